"""Keras models in the shape of keras.io's, compiled, with a batch; `SOURCES` says which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCES: dict[str, str] = {}
PROGRAMS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {}
WITH_BLOCKS = ("xception", "vit", "mixer", "mini_gpt", "conv1d", "nerf", "densenet")
"""Programs with places where one tensor is all that passes."""


def program(source: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a program: a function that returns a compiled model, inputs and labels."""

    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        SOURCES[build.__name__], PROGRAMS[build.__name__] = f"keras.io/examples/{source}", build
        return build

    return register


def normal(*shape: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).normal(size=shape).astype("float32")


def integers(most: int, *shape: int) -> Any:
    import numpy as np

    return np.random.default_rng(1).integers(0, most, shape)


def compiled(inputs: Any, outputs: Any, loss: str = "sparse_categorical_crossentropy") -> Any:
    import keras

    model = keras.Model(inputs, outputs)
    model.compile(optimizer="adam", loss=loss)
    return model


@program("vision/mnist_convnet")
def mnist_convnet() -> Any:
    """Convolutions, pools and dropout."""
    from keras import Input, Sequential, layers

    stack = [
        Input((28, 28, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"),
    ]
    model = Sequential(
        [*stack, layers.MaxPooling2D(), layers.Flatten(), layers.Dropout(0.5), layers.Dense(10, activation="softmax")]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, normal(128, 28, 28, 1), integers(10, 128)


@program("vision/image_classification_from_scratch")
def xception() -> Any:
    """Separable convolutions with BatchNorm and residuals."""
    from keras import Input, layers

    inputs = x = Input((64, 64, 3))
    x = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv2D(32, 3, strides=2, padding="same")(x)))
    for width in (32, 64):
        kept = layers.Conv2D(width, 1, strides=2, padding="same")(x)
        for _ in range(2):
            x = layers.BatchNormalization()(layers.SeparableConv2D(width, 3, padding="same")(layers.Activation("relu")(x)))
        x = layers.add([layers.MaxPooling2D(3, strides=2, padding="same")(x), kept])
    outputs = layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling2D()(x))
    return compiled(inputs, outputs), normal(32, 64, 64, 3), integers(2, 32)


@program("vision/oxford_pets_image_segmentation")
def unet() -> Any:
    """A U-Net with transposed convolutions."""
    from keras import Input, layers

    inputs = x = Input((64, 64, 3))
    skips = []
    for width in (16, 32):
        x = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", activation="relu")(x))
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    for width in (32, 16):
        x = layers.Conv2DTranspose(width, 3, strides=2, padding="same", activation="relu")(x)
        x = layers.Concatenate()([x, skips.pop()])
    outputs = layers.Conv2D(3, 3, padding="same", activation="softmax")(x)
    return compiled(inputs, outputs), normal(16, 64, 64, 3), integers(3, 16, 64, 64)


@program("vision/image_classification_with_vision_transformer")
def vit() -> Any:
    """Patches and transformer blocks."""
    from keras import Input, layers

    inputs = Input((64, 108))
    x = layers.Dense(64)(inputs)
    for _ in range(4):
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([layers.MultiHeadAttention(4, 16, dropout=0.1)(y, y), x])
        y = layers.Dense(128, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
        x = layers.Add()([layers.Dropout(0.1)(layers.Dense(64)(y)), x])
    return compiled(inputs, layers.Dense(10, activation="softmax")(layers.Flatten()(x))), normal(32, 64, 108), integers(10, 32)


@program("vision/mlp_image_classification")
def mixer() -> Any:
    """MLPs over patches and over channels."""
    from keras import Input, layers

    inputs = Input((64, 48))
    x = layers.Dense(64)(inputs)
    for _ in range(4):
        y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Permute((2, 1))(layers.Dense(64)(layers.Dense(128, activation="gelu")(y)))])
        x = layers.Add()([x, layers.Dense(64)(layers.Dense(128, activation="gelu")(layers.LayerNormalization()(x)))])
    outputs = layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    return compiled(inputs, outputs), normal(64, 64, 48), integers(10, 64)


@program("nlp/text_classification_with_transformer")
def text_transformer() -> Any:
    """Token and position embeddings, one block."""
    from keras import Input, layers

    inputs = Input((128,), dtype="int32")
    x = layers.Embedding(2000, 32)(inputs)
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.MultiHeadAttention(2, 32)(x, x)))
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.Dense(32)(layers.Dense(32, activation="relu")(x))))
    outputs = layers.Dense(2, activation="softmax")(layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x)))
    return compiled(inputs, outputs), integers(2000, 64, 128), integers(2, 64)


@program("generative/text_generation_with_miniature_gpt")
def mini_gpt() -> Any:
    """Causal attention and a large vocabulary."""
    from keras import Input, layers

    inputs = Input((80,), dtype="int32")
    x = layers.Embedding(2000, 64)(inputs)
    for _ in range(2):
        x = layers.LayerNormalization(epsilon=1e-6)(x + layers.MultiHeadAttention(2, 64)(x, x, use_causal_mask=True))
        x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dense(64)(layers.Dense(256, activation="relu")(x)))
    return compiled(inputs, layers.Dense(2000, activation="softmax")(x)), integers(2000, 16, 80), integers(2000, 16, 80)


@program("nlp/bidirectional_lstm_imdb")
def lstm() -> Any:
    """Two bidirectional loops."""
    from keras import Input, layers

    inputs = Input((40,), dtype="int32")
    x = layers.Bidirectional(layers.LSTM(64, return_sequences=True))(layers.Embedding(2000, 64)(inputs))
    outputs = layers.Dense(1, activation="sigmoid")(layers.Bidirectional(layers.LSTM(64))(x))
    return compiled(inputs, outputs, "binary_crossentropy"), integers(2000, 64, 40), integers(2, 64)


@program("timeseries/timeseries_weather_forecasting")
def gru() -> Any:
    """A GRU over a series."""
    from keras import Input, layers

    inputs = Input((60, 8))
    return compiled(inputs, layers.Dense(1)(layers.GRU(128)(inputs)), "mse"), normal(128, 60, 8), normal(128, 1)


@program("timeseries/timeseries_classification_from_scratch")
def conv1d() -> Any:
    """Convolutions over time with BatchNorm."""
    from keras import Input, layers

    inputs = x = Input((500, 1))
    for _ in range(3):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv1D(64, 3, padding="same")(x)))
    outputs = layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    return compiled(inputs, outputs), normal(32, 500, 1), integers(2, 32)


@program("vision/autoencoder")
def autoencoder() -> Any:
    """Convolutions down and up."""
    from keras import Input, layers

    inputs = x = Input((28, 28, 1))
    for _ in range(2):
        x = layers.MaxPooling2D(padding="same")(layers.Conv2D(32, 3, activation="relu", padding="same")(x))
    for _ in range(2):
        x = layers.Conv2DTranspose(32, 3, strides=2, activation="relu", padding="same")(x)
    outputs = layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x)
    return compiled(inputs, outputs, "binary_crossentropy"), normal(64, 28, 28, 1), integers(2, 64, 28, 28, 1)


@program("vision/nerf")
def nerf() -> Any:
    """Dense layers with a skip over encoded positions."""
    from keras import Input, layers

    inputs = x = Input((2048, 60))
    for i in range(6):
        x = layers.Dense(64, activation="relu")(x)
        if i == 3:
            x = layers.concatenate([x, inputs])
    return compiled(inputs, layers.Dense(4)(x), "mse"), normal(2, 2048, 60), normal(2, 2048, 4)


@program("vision/densenet (keras.applications)")
def densenet() -> Any:
    """Layers that read all layers before them."""
    from keras import Input, layers

    inputs = Input((32, 32, 3))
    x = layers.Conv2D(24, 3, padding="same")(inputs)
    for block in range(2):
        for _ in range(5):
            y = layers.Conv2D(12, 3, padding="same")(layers.ReLU()(layers.BatchNormalization()(x)))
            x = layers.Concatenate()([x, y])
        if block == 0:
            x = layers.AveragePooling2D(2)(layers.Conv2D(32, 1)(layers.ReLU()(layers.BatchNormalization()(x))))
    outputs = layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(x))
    return compiled(inputs, outputs), normal(32, 32, 32, 3), integers(10, 32)


@program("generative/vae")
def vae() -> Any:
    """A train_step of its own, with a sampled latent and three trackers."""
    import keras
    import tensorflow as tf
    from keras import Input, Sequential, layers

    class VAE(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            narrow = [layers.Conv2D(w, 3, activation="relu", strides=2, padding="same") for w in (32, 64)]
            self.encoder = Sequential([Input((28, 28, 1)), *narrow, layers.Flatten(), layers.Dense(4)])
            wide = [layers.Conv2DTranspose(w, 3, activation="relu", strides=2, padding="same") for w in (64, 32)]
            start = [Input((2,)), layers.Dense(3136, activation="relu"), layers.Reshape((7, 7, 64))]
            self.decoder = Sequential([*start, *wide, layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")])
            self.seed, self.tracker = keras.random.SeedGenerator(0), keras.metrics.Mean(name="loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker]

        def train_step(self, data: Any) -> dict[str, Any]:
            images = data[0]
            with tf.GradientTape() as tape:
                mean, logvar = tf.split(self.encoder(images), 2, -1)
                z = mean + tf.exp(0.5 * logvar) * keras.random.normal(tf.shape(mean), seed=self.seed)
                misses: Any = keras.losses.binary_crossentropy(images, self.decoder(z))
                likeness = tf.reduce_mean(tf.reduce_sum(misses, (1, 2)))
                loss = likeness - 0.5 * tf.reduce_mean(1 + logvar - mean**2 - tf.exp(logvar))
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    model = VAE()
    model.compile(optimizer="adam")
    return model, 1.0 * integers(2, 64, 28, 28, 1), integers(2, 64)


@program("generative/vq_vae")
def vq_vae() -> Any:
    """The nearest of 64 vectors, a straight-through gradient, and losses that layers add."""
    import keras
    import tensorflow as tf
    from keras import Input, layers

    class Quantizer(layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.vectors: Any = self.add_weight(shape=(16, 64), initializer="random_uniform")

        def call(self, x: Any) -> Any:
            flat = tf.reshape(x, (-1, 16))
            distances = tf.reduce_sum(flat**2, 1, keepdims=True) + tf.reduce_sum(self.vectors**2, 0) - 2 * flat @ self.vectors
            chosen = tf.one_hot(tf.argmin(distances, 1), 64)
            nearest = tf.reshape(tf.matmul(chosen, self.vectors, transpose_b=True), tf.shape(x))
            self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(nearest) - x) ** 2))
            self.add_loss(tf.reduce_mean((nearest - tf.stop_gradient(x)) ** 2))
            return x + tf.stop_gradient(nearest - x)

    inputs = x = Input((28, 28, 1))
    for width in (32, 64):
        x = layers.Conv2D(width, 3, activation="relu", strides=2, padding="same")(x)
    x = Quantizer()(layers.Conv2D(16, 1, padding="same")(x))
    for width in (64, 32):
        x = layers.Conv2DTranspose(width, 3, activation="relu", strides=2, padding="same")(x)
    model = keras.Model(inputs, layers.Conv2DTranspose(1, 3, padding="same")(x))
    model.compile(optimizer="adam", loss="mse")
    images = normal(64, 28, 28, 1)
    return model, images, images


@program("generative/ddim")
def ddim() -> Any:
    """A residual U-Net that predicts noise, in a train_step of its own with an average of the weights."""
    import keras
    import tensorflow as tf
    from keras import Input, layers

    def block(x: Any, width: int) -> Any:
        kept = x if x.shape[-1] == width else layers.Conv2D(width, 1)(x)
        y = layers.Conv2D(width, 3, padding="same", activation="swish")(layers.BatchNormalization(center=False, scale=False)(x))
        return layers.Add()([layers.Conv2D(width, 3, padding="same")(y), kept])

    def network() -> Any:
        images, rates = Input((32, 32, 3)), Input((1, 1, 1))
        x = layers.Concatenate()([layers.Conv2D(16, 1)(images), layers.UpSampling2D(32)(rates)])
        skips = []
        for width in (16, 32):
            for _ in range(2):
                x = block(x, width)
                skips.append(x)
            x = layers.AveragePooling2D(2)(x)
        x = block(x, 48)
        for width in (32, 16):
            x = layers.UpSampling2D(2, interpolation="bilinear")(x)
            for _ in range(2):
                x = block(layers.Concatenate()([x, skips.pop()]), width)
        return keras.Model([images, rates], layers.Conv2D(3, 1, kernel_initializer="zeros")(x))

    class Diffusion(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.average = network(), network()
            self.average.set_weights(self.network.get_weights())
            self.seed, self.tracker = keras.random.SeedGenerator(0), keras.metrics.Mean(name="noise_loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker]

        def train_step(self, data: Any) -> dict[str, Any]:
            images = data[0]
            noise: Any = keras.random.normal(tf.shape(images), seed=self.seed)
            times: Any = keras.random.uniform((tf.shape(images)[0], 1, 1, 1), seed=self.seed)
            with tf.GradientTape() as tape:
                predicted = self.network([tf.cos(times) * images + tf.sin(times) * noise, tf.sin(times) ** 2], training=True)
                loss = tf.reduce_mean(tf.abs(noise - predicted))
            weights = self.network.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.tracker.update_state(loss)
            for mean, weight in zip(self.average.weights, self.network.weights, strict=True):
                mean.assign(0.999 * mean + 0.001 * weight)
            return {"noise_loss": self.tracker.result()}

    model = Diffusion()
    model.compile(optimizer="adam")
    return model, normal(16, 32, 32, 3), integers(2, 16)


@program("vision/metric_learning, siamese_contrastive")
def siamese() -> Any:
    """One network on two inputs, and their distance."""
    import keras
    from keras import Input, Sequential, layers

    convolutions = [layers.Conv2D(w, 5, activation="tanh") for w in (8, 16)]
    body = Sequential(
        [Input((28, 28, 1)), layers.BatchNormalization(), convolutions[0], layers.AveragePooling2D(2), convolutions[1]]
    )
    one = Sequential([body, layers.AveragePooling2D(2), layers.Flatten(), layers.Dense(10, activation="tanh")])
    a, b = Input((28, 28, 1)), Input((28, 28, 1))
    squared: Any = keras.ops.sum((one(a) - one(b)) ** 2, -1, keepdims=True)
    distance = keras.ops.sqrt(squared + 1e-7)
    outputs = layers.Dense(1, activation="sigmoid")(layers.BatchNormalization()(distance))
    return (
        compiled([a, b], outputs, "binary_crossentropy"),
        [normal(64, 28, 28, 1), normal(64, 28, 28, 1)[::-1]],
        integers(2, 64),
    )
