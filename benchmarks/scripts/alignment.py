"""Training scripts of preference learning and fine-tuning, in the shape of their sources; models are small and random."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from .loop import STEPS, compiled, log, script, steps


def tiny_gpt2(**changed: float) -> nn.Module:
    """A GPT-2 of three layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"vocab_size": 384, "n_positions": 128, "n_embd": 64, "n_layer": 3, "n_head": 4, "bos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**settings, "eos_token_id": 1, "pad_token_id": 2, **changed}))


@script("eric-mitchell/direct-preference-optimization", "reference network under no_grad, two forwards in one, RMSprop, clipping")
def dpo_by_hand() -> None:
    policy = tiny_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    reference_model = copy.deepcopy(policy).eval().requires_grad_(False)
    policy, reference_model = compiled(policy), compiled(reference_model)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-7)

    def get_batch_logps(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels, logits = labels[:, 1:].clone(), logits[:, :-1, :]
        loss_mask = labels != -100
        labels[labels == -100] = 0
        per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
        return (per_token_logps * loss_mask).sum(-1)

    def concatenated_forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.cat([batch["chosen_input_ids"], batch["rejected_input_ids"]], dim=0)
        labels = torch.cat([batch["chosen_labels"], batch["rejected_labels"]], dim=0)
        all_logits = model(ids, attention_mask=torch.ones_like(ids)).logits.to(torch.float32)
        all_logps = get_batch_logps(all_logits, labels)
        half = batch["chosen_input_ids"].shape[0]
        return all_logps[:half], all_logps[half:]

    def make_batch() -> dict[str, torch.Tensor]:
        batch = {}
        for kind in ("chosen", "rejected"):
            ids = torch.randint(3, 384, (4, 96))
            labels = ids.clone()
            labels[:, :32] = -100
            batch |= {f"{kind}_input_ids": ids, f"{kind}_labels": labels}
        return batch

    policy.train()
    for batch in steps(make_batch() for _ in range(STEPS)):
        policy_chosen, policy_rejected = concatenated_forward(policy, batch)
        with torch.no_grad():
            reference_chosen, reference_rejected = concatenated_forward(reference_model, batch)
        logits = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
        losses = -F.logsigmoid(0.1 * logits)
        loss = losses.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        log(loss)
