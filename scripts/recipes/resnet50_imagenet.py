"""Trains ResNet-50 on ImageNet as the TensorFlow models do: 90 epochs, label smoothing, SGD.

Source of the settings: tensorflow/models, official/vision/configs/experiments/image_classification/
imagenet_resnet50_gpu.yaml, which reports 76.1% top-1. What was run here: some steps on sample data
on a CPU. The 90 epochs have not been run. It runs on all GPUs that TensorFlow sees, else on the
CPU, and continues where --resume says it was.

example: python scripts/recipes/resnet50_imagenet.py --train='imagenet/train-*'
  --validation='imagenet/validation-*' --label_offset=1 --resume=runs/resnet50
"""

import contextlib
import sys
from typing import Any

import dali_tf_input as dti
from dali_tf_input.cli import command

FLAGS = command.Flags()
_TRAIN = FLAGS.string("train", None, "Indexed TFRecord files for training, a pattern.")
_VALIDATION = FLAGS.string("validation", None, "Those for validation.")
_LABEL_OFFSET = FLAGS.integer("label_offset", 0, "Stored label of the first class.")
_NUM_CLASSES = FLAGS.integer("num_classes", 1000, "How many classes there are.", 2)
_IMAGE_SIZE = FLAGS.integer("image_size", 224, "Height and width of the images.", 32)
_BATCH_SIZE = FLAGS.integer("batch_size", 1024, "Images in a step of all GPUs.", 1)
_EPOCHS = FLAGS.integer("epochs", 90, "Passes over the training records.", 1)
_MAX_STEPS = FLAGS.integer("max_steps", None, "Steps of an epoch, to try it; else all.", 1)
_MIXED_PRECISION = FLAGS.boolean("mixed_precision", True, "Compute in float16, on GPUs.")
_RESUME = FLAGS.string("resume", None, "Folder that keeps the state of training.")

_WEIGHT_DECAY, _MOMENTUM, _SMOOTHING = 1e-4, 0.9, 0.1
_BASE_RATE, _WARMUP_EPOCHS, _DECAY_EPOCHS = 0.1, 5, (30, 60, 80)  # the rate is for 256 images


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    if not _TRAIN.value or not _VALIDATION.value:
        raise dti.InputError("Name the files: --train='path/train-*' --validation='path/val-*'")
    size, classes = _IMAGE_SIZE.value, _NUM_CLASSES.value
    one_hot = {"offset": _LABEL_OFFSET.value, "num_classes": classes, "one_hot": True}
    label = dti.ClassLabel(**one_hot, smoothing=_SMOOTHING)
    train_spec = dti.InputSpec.for_training(_TRAIN.value, size, recipe="resnet-50", label=label)
    valid_spec = dti.InputSpec.for_evaluation(
        _VALIDATION.value, size, label=dti.ClassLabel(**one_hot)
    )
    tf = command.import_tensorflow()
    import keras

    gpus = tf.config.list_physical_devices("GPU")
    strategy = tf.distribute.MirroredStrategy() if len(gpus) > 1 else None
    train = dti.load(train_spec, batch_size=_BATCH_SIZE.value, strategy=strategy)
    valid = dti.load(valid_spec, train.options, batch_size=_BATCH_SIZE.value, strategy=strategy)
    if gpus and _MIXED_PRECISION.value:
        keras.mixed_precision.set_global_policy("mixed_float16")
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_resnet50(keras, size, classes)
        model.compile(
            keras.optimizers.SGD(find_rate(0), momentum=_MOMENTUM, nesterov=True),
            keras.losses.CategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    print(f"input       {train!r}")
    history = train.fit(
        model,
        epochs=_EPOCHS.value,
        validation=valid,
        resume=_RESUME.value,
        steps_per_epoch=_MAX_STEPS.value,
        callbacks=[keras.callbacks.LearningRateScheduler(find_rate)],
        verbose=2,
    ).history
    epochs = command.format_count(len(history["loss"]), "epoch")
    print(f"top-1       {history['val_accuracy'][-1]:.2%} after {epochs}")
    return 0


def find_rate(epoch: int, rate: float = 0.0) -> float:
    """Returns the learning rate of an epoch: it rises for five, and falls tenfold three times."""
    rate = _BASE_RATE * _BATCH_SIZE.value / 256 * min(1.0, (epoch + 1) / _WARMUP_EPOCHS)
    return rate * 0.1 ** sum(epoch >= end for end in _DECAY_EPOCHS)


def make_resnet50(keras: Any, size: int, classes: int) -> Any:
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
    sys.exit(command.run(main, FLAGS))
