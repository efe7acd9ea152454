"""Trains ResNet-50 on ImageNet as the TensorFlow models do: 90 epochs, label smoothing, SGD.

Source of the settings: tensorflow/models, official/vision/configs/experiments/image_classification/
imagenet_resnet50_gpu.yaml, which reports 76.1% top-1. What was run here: some steps on sample data
on a CPU. The 90 epochs have not been run. It runs on all GPUs that TensorFlow sees, else on the
CPU, and continues where --resume says it was.

example: python scripts/recipes/resnet50_imagenet.py --train='imagenet/train-*'
  --validation='imagenet/validation-*' --label_offset=1 --resume=runs/resnet50
"""

import argparse
import contextlib
import functools
import sys
from typing import Any

import keras
import tensorflow as tf

import dali_tf_input as dti

_WEIGHT_DECAY, _MOMENTUM, _SMOOTHING = 1e-4, 0.9, 0.1
_BASE_RATE, _WARMUP_EPOCHS, _DECAY_EPOCHS = 0.1, 5, (30, 60, 80)  # the rate is for 256 images


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    description, example = __doc__.split("\n\nexample: ")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--train", required=True, help="indexed TFRecords for training, a pattern")
    add("--validation", required=True, help="those for validation")
    add("--label_offset", default=0, type=int, help="stored label of the first class")
    add("--num_classes", default=1000, type=int, help="how many classes there are")
    add("--image_size", default=224, type=int, help="height and width of the images")
    add("--batch_size", default=1024, type=int, help="images in a step of all GPUs")
    add("--epochs", default=90, type=int, help="epochs in all")
    add("--max_steps", type=int, help="steps of an epoch, to try it (default: all)")
    add("--float32", action="store_true", help="compute in float32 on GPUs, too, not in float16")
    add("--resume", help="folder that keeps the state of training")
    return parser.parse_args(words)


def main(arguments: argparse.Namespace) -> None:
    size, classes = arguments.image_size, arguments.num_classes
    one_hot = {"offset": arguments.label_offset, "num_classes": classes, "one_hot": True}
    label = dti.ClassLabel(**one_hot, smoothing=_SMOOTHING)
    train_spec = dti.InputSpec.for_training(arguments.train, size, recipe="resnet-50", label=label)
    valid_spec = dti.InputSpec.for_evaluation(
        arguments.validation, size, label=dti.ClassLabel(**one_hot)
    )
    gpus = tf.config.list_physical_devices("GPU")
    strategy = tf.distribute.MirroredStrategy() if len(gpus) > 1 else None
    shared = {"batch_size": arguments.batch_size, "strategy": strategy}
    train = dti.load(train_spec, **shared)
    valid = dti.load(valid_spec, train.options, **shared)
    rate = functools.partial(find_rate, arguments.batch_size)
    if gpus and not arguments.float32:
        keras.mixed_precision.set_global_policy("mixed_float16")
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_resnet50(size, classes)
        model.compile(
            keras.optimizers.SGD(rate(0), momentum=_MOMENTUM, nesterov=True),
            keras.losses.CategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    print(f"input       {train!r}")
    history = train.fit(
        model,
        epochs=arguments.epochs,
        validation=valid,
        resume=arguments.resume,
        steps_per_epoch=arguments.max_steps,
        callbacks=[keras.callbacks.LearningRateScheduler(rate)],
        verbose=2,
    ).history
    print(f"top-1       {history['val_accuracy'][-1]:.2%} after {len(history['loss'])} epochs")


def find_rate(batch_size: int, epoch: int, rate: float = 0.0) -> float:
    """Returns the learning rate of an epoch: it rises for five, and falls tenfold three times."""
    rate = _BASE_RATE * batch_size / 256 * min(1.0, (epoch + 1) / _WARMUP_EPOCHS)
    return rate * 0.1 ** sum(epoch >= end for end in _DECAY_EPOCHS)


def make_resnet50(size: int, classes: int) -> keras.Model:
    """Returns ResNet-50 v1.5, from normalized images to logits: strides are in the 3x3."""
    layers = keras.layers
    decay = keras.regularizers.L2(_WEIGHT_DECAY / 2)  # Keras's has no factor 1/2

    def convolve(x: Any, filters: int, kernel: int, strides: int = 1, gamma: str = "ones") -> Any:
        x = layers.Conv2D(
            filters,
            kernel,
            strides,
            padding="same",
            use_bias=False,
            kernel_initializer="he_normal",
            kernel_regularizer=decay,
        )(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma)(x)

    images = keras.Input((size, size, 3))
    x = layers.ReLU()(convolve(images, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for filters, blocks, strides in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = strides if block == 0 else 1
            shortcut = convolve(x, 4 * filters, 1, stride) if block == 0 else x
            y = layers.ReLU()(convolve(x, filters, 1))
            y = layers.ReLU()(convolve(y, filters, 3, stride))
            y = convolve(y, 4 * filters, 1, gamma="zeros")
            x = layers.ReLU()(y + shortcut)
    x = layers.GlobalAveragePooling2D()(x)
    logits = layers.Dense(classes, kernel_regularizer=decay, dtype="float32")(x)
    return keras.Model(images, logits)


if __name__ == "__main__":
    try:
        main(read_arguments())
    except dti.InputError as error:
        sys.exit(f"error: {error}")
