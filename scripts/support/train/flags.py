"""The flags of train.py, and what can be checked of them before TensorFlow is imported."""

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import BACKENDS, FileFlags


class TrainFlags:
    """The flags of train.py."""

    def __init__(self, flags: command.Flags) -> None:
        self.records = FileFlags(flags)
        self.validation_files = flags.strings(
            "validation_files", "TFRecords of the validation split."
        )
        backends = ["auto", *BACKENDS]
        self.backend = flags.choice("backend", "auto", backends, "What feeds the network.")
        self.replicas = flags.integer(
            "replicas", 1, "Copies of the network: GPUs, else CPU devices.", 1
        )
        strategies = ["mirrored", "multi_worker"]
        self.strategy = flags.choice(
            "strategy", "mirrored", strategies, "multi_worker: TF_CONFIG says which worker this is."
        )
        self.batch_size = flags.integer("batch_size", 32, "Images in a step.", 1)
        self.epochs = flags.integer("epochs", 12, "Passes over the training records.", 1)
        self.image_size = flags.integer("image_size", 96, "Height and width of the images.", 1)
        self.learning_rate = flags.number("learning_rate", 2e-3, "Learning rate of Adam.")
        self.num_classes = flags.integer("num_classes", None, "Number of classes; else found.", 1)
        augmentations = ["trivial", "rand"]
        self.auto_augment = flags.choice("auto_augment", None, augmentations, "Augmentation.")
        self.mixup = flags.number("mixup", 0.0, "Alpha of Mixup, above 0.")
        self.cutmix = flags.number("cutmix", 0.0, "Alpha of CutMix, in (0, 1].")
        self.label_smoothing = flags.number(
            "label_smoothing", 0.0, "Part of a label spread over all classes, in [0, 1)."
        )
        self.order = flags.choice("order", "global", ["global", "buffer"], "How records are mixed.")
        self.service = flags.string("service", None, "tf.data service, grpc://host:port.")
        self.resume = flags.string("resume", None, "Folder that keeps the state of training.")
        self.save_every = flags.integer(
            "save_every", None, "Steps between saves; else an epoch.", 1
        )
        self.save = flags.string("save", None, "File for the trained model, a .keras.")
        self.profile_input = flags.boolean("profile_input", False, "Measure the wait for input.")
        self.seed = flags.integer("seed", 0, "Seed of weights, order, crops and mirrors.", 0)

    def check(self) -> None:
        """Raises InputError for flags that are out of range, or that exclude each other."""
        multi_worker = self.strategy.value == "multi_worker"
        mixes = self.mixup.value or self.cutmix.value
        if self.mixup.value < 0 or not 0 <= self.cutmix.value <= 1:
            raise InputError(
                "`mixup` must be at least 0 and `cutmix` in [0, 1], got "
                f"{self.mixup.value} and {self.cutmix.value}."
            )
        if multi_worker and (mixes or self.replicas.value != 1 or self.profile_input.value):
            raise InputError(
                "--mixup, --cutmix, --replicas and --profile_input are for --strategy=mirrored"
                " only."
            )
        if self.resume.value and self.order.value != "global":
            raise InputError(f"--resume needs --order=global, got {self.order.value}.")
        if self.save_every.value is not None and not self.resume.value:
            raise InputError("--save_every is for --resume=FOLDER, which is not given.")
        if not multi_worker:  # of several workers one saves, and only its machine needs the folder
            command.check_writable(self.save, suffix=".keras")
