"""Training scripts on sentences and speech, in the shape of their sources; models are small and random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .loop import STEPS, compiled, log, script, steps


@script("PyTorch tutorial: seq2seq translation", "encoder and decoder with attention, teacher forcing at random, two optimizers")
def seq2seq() -> None:
    hidden_size, vocab, length = 64, 300, 10

    class EncoderRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.gru = nn.Embedding(vocab, hidden_size), nn.GRU(hidden_size, hidden_size, batch_first=True)
            self.dropout = nn.Dropout(0.1)

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.gru(self.dropout(self.embedding(tokens)))

    class AttnDecoderRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab, hidden_size)
            self.Wa, self.Ua, self.Va = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)
            self.gru, self.out = nn.GRU(2 * hidden_size, hidden_size, batch_first=True), nn.Linear(hidden_size, vocab)
            self.dropout = nn.Dropout(0.1)

        def forward(self, encoder_outputs: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
            decoder_input = torch.zeros(encoder_outputs.size(0), 1, dtype=torch.long)
            decoder_outputs = []
            for i in range(length):
                embedded = self.dropout(self.embedding(decoder_input))
                scores = self.Va(torch.tanh(self.Wa(hidden.permute(1, 0, 2)) + self.Ua(encoder_outputs)))
                context = torch.bmm(F.softmax(scores.squeeze(2).unsqueeze(1), dim=-1), encoder_outputs)
                output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
                decoded = self.out(output)
                decoder_outputs.append(decoded)
                forced = target is not None
                decoder_input = target[:, i].unsqueeze(1) if forced else decoded.topk(1)[1].squeeze(-1).detach()
            return F.log_softmax(torch.cat(decoder_outputs, dim=1), dim=-1)

    encoder, decoder = compiled(EncoderRNN()), compiled(AttnDecoderRNN())
    encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=0.001)
    decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=0.001)
    criterion = nn.NLLLoss()
    batches = ((torch.randint(vocab, (96, length)), torch.randint(vocab, (96, length))) for _ in range(STEPS))
    for i, (input_tensor, target_tensor) in enumerate(steps(batches)):
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        forced = target_tensor if i % 3 != 1 else None
        decoder_outputs = decoder(encoder_outputs, encoder_hidden, forced)
        loss = criterion(decoder_outputs.view(-1, vocab), target_tensor.view(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        log(loss)


@script("SeanNaren/deepspeech.pytorch", "convolutions and GRU, CTC loss on lengths, batches of other lengths, SGD with Nesterov")
def speech_ctc() -> None:
    class DeepSpeech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, (11, 11), (2, 2), (5, 5)), nn.BatchNorm2d(16), nn.Hardtanh(0, 20, inplace=True)
            )
            self.rnn = nn.GRU(16 * 32, 64, 1, bidirectional=True)
            self.fc = nn.Linear(128, 29, bias=False)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.conv(x)
            x = x.view(x.size(0), -1, x.size(3)).permute(2, 0, 1)
            x, _ = self.rnn(x.contiguous())
            return self.fc(x).log_softmax(-1), (lengths + 1) // 2

    model = compiled(DeepSpeech())
    criterion = nn.CTCLoss(reduction="sum", zero_infinity=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, weight_decay=1e-5)
    model.train()
    for frames in steps((160, 160, 128, 160, 128, 160)):
        inputs, input_lengths = torch.rand(8, 1, 64, frames), torch.full((8,), frames)
        targets, target_lengths = torch.randint(1, 29, (8, 10)), torch.randint(5, 10, (8,))
        out, output_lengths = model(inputs, input_lengths)
        loss = criterion(out, targets, output_lengths, target_lengths) / inputs.size(0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 400)
        optimizer.step()
        log(loss)
