"""Mixup and CutMix with Keras's layers, in the training step."""

import keras
import tensorflow as tf


class MixupCutmix(keras.Model):
    """Trains a model on batches whose images and one-hot labels are mixed in pairs, on the device.

    Mixup (arXiv 1710.09412) blends two images, CutMix (arXiv 1905.04899) pastes a part of one into
    the other. With both, each step uses one of them, as torchvision's reference training does. With
    neither, it trains as the model would.
    """

    def __init__(self, model: keras.Model, *, mixup: float, cutmix: float) -> None:
        super().__init__()
        self.model = model
        self._mixers = []
        if mixup:
            self._mixers.append(keras.layers.MixUp(alpha=mixup))
        if cutmix:
            self._mixers.append(keras.layers.CutMix(factor=(cutmix, cutmix)))

    def build(self, input_shape: tuple[int, ...]) -> None:
        """There is nothing to build: the model is."""

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.model(images, training=training)

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        return super().train_step(self.mix(*data) if self._mixers else data)

    def mix(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Mixes images (batch, height, width, channels) and labels (batch, classes)."""

        def mix_by(mixer: keras.Layer) -> tuple[tf.Tensor, tf.Tensor]:
            mixed = mixer({"images": images, "labels": labels}, training=True)
            return mixed["images"], mixed["labels"]

        if len(self._mixers) == 1:
            return mix_by(self._mixers[0])
        first, second = self._mixers
        return tf.cond(tf.random.uniform(()) < 0.5, lambda: mix_by(first), lambda: mix_by(second))
