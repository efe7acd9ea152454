"""The flags of train.py, and what can be said of them before TensorFlow is there."""

from absl import flags

import console
from dali_tf_input import InputError

VALIDATION_FILES = flags.DEFINE_multi_string("validation_files", [], "TFRecord files of the validation split.")
BACKEND = flags.DEFINE_enum(
    "backend", "auto", ["auto", "dali_cpu", "dali_gpu", "tf_data"], "What feeds the network; auto chooses for this machine."
)
OPTIONS = flags.DEFINE_string("options", None, "Options that scripts/tune.py found, a .json file, instead of --backend.")
REPLICAS = flags.DEFINE_integer("replicas", 1, "Copies of the network: GPUs, or logical CPU devices where there is no GPU.")
STRATEGY = flags.DEFINE_enum(
    "strategy", "mirrored", ["mirrored", "multi_worker"], "multi_worker: this process is a worker, TF_CONFIG says which."
)
GLOBAL_BATCH_SIZE = flags.DEFINE_integer("global_batch_size", 32, "Images in a step, over all replicas.")
EPOCHS = flags.DEFINE_integer("epochs", 12, "Passes over the training records.")
IMAGE_SIZE = flags.DEFINE_integer("image_size", 96, "Height and width of the images the network sees, in pixels.")
LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "Learning rate of Adam; with --resume that of the state.")
NUM_CLASSES = flags.DEFINE_integer("num_classes", None, "Number of classes; by default that of labels.txt.")
AUTO_AUGMENT = flags.DEFINE_enum("auto_augment", None, ["trivial", "rand"], "Augmentation of the training images.")
MIXUP = flags.DEFINE_float("mixup", 0.0, "Alpha of Mixup, above 0; each pair of images is blended by Beta(alpha, alpha).")
CUTMIX = flags.DEFINE_float("cutmix", 0.0, "Alpha of CutMix, in (0, 1]; with Mixup each step takes one of the two.")
LABEL_SMOOTHING = flags.DEFINE_float("label_smoothing", 0.0, "Part of a training label spread over all classes, in [0, 1).")
ORDER = flags.DEFINE_enum("order", "global", ["global", "buffer"], "How the training records are mixed.")
SERVICE = flags.DEFINE_string("service", None, "tf.data service that preprocesses, grpc://host:port; with --order=buffer.")
RESUME = flags.DEFINE_string("resume", None, "Folder that keeps the state of training, to go on from after a stop.")
SAVE_EVERY = flags.DEFINE_integer("save_every", None, "Steps after which that state is saved; by default those of an epoch.")
SAVE = flags.DEFINE_string("save", None, "Where the trained model goes, a .keras file; for predict.py.")
PROFILE_INPUT = flags.DEFINE_boolean("profile_input", False, "Measure how long the network waits for input, and advise.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the network's weights and of order, crops and mirrors.")


def check(arguments: list[str]) -> None:
    """Raises InputError where flags are out of their range, or do not go together."""
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}. Files are named by --files and --validation_files.")
    for name, least in (("epochs", 1), ("image_size", 1), ("replicas", 1), ("seed", 0), ("num_classes", 1)):
        value = flags.FLAGS[name].value
        if value is not None and value < least:
            raise InputError(f"`{name}` must be at least {least}, got {value}.")
    if MIXUP.value < 0 or not 0 <= CUTMIX.value <= 1:
        raise InputError(f"`mixup` must be at least 0 and `cutmix` in [0, 1], got {MIXUP.value} and {CUTMIX.value}.")
    if STRATEGY.value == "multi_worker" and (MIXUP.value or CUTMIX.value or REPLICAS.value != 1):
        raise InputError("--mixup, --cutmix and --replicas are for --strategy=mirrored only.")
    if OPTIONS.value and BACKEND.present:
        raise InputError("--options says which backend it is: leave out --backend.")
    if PROFILE_INPUT.value and STRATEGY.value == "multi_worker":
        raise InputError("--profile_input is for --strategy=mirrored only: it is a callback of Keras's fit.")
    if RESUME.value and ORDER.value != "global":
        raise InputError(f"--resume takes an order that is planned: --order=global, got {ORDER.value}.")
    if SAVE_EVERY.value is not None and not RESUME.value:
        raise InputError("--save_every is for --resume=FOLDER, which is not given.")
    if SAVE.value and not SAVE.value.endswith(".keras"):
        raise InputError(f"`save` must end in .keras, got {SAVE.value}.")
    if SAVE.value and STRATEGY.value == "mirrored":  # of several workers one saves, and only its machine needs the folder
        console.check_writable(SAVE.value, flag="save", suffix=".keras")
