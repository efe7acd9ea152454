"""Flags that several commands share: which records are read, and what is done to each image."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import dali_tf_input as dti
from dali_tf_input.cli.command import Flags
from dali_tf_input.records.class_names import read_class_names
from dali_tf_input.records.labels import Label, LabelKind
from dali_tf_input.spec.augment import Augmentation
from dali_tf_input.spec.crops import CoverCrop, Crop, NoCrop
from dali_tf_input.storage.objects import local_path

# What users call the augmentations on the command line.
AUGMENTATIONS: dict[str, Augmentation] = {
    "rand": dti.augment.RandAugment(),
    "trivial": dti.augment.TrivialAugment(),
    "jitter": dti.augment.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    "grayscale": dti.augment.RandomGrayscale(),
    "blur": dti.augment.GaussianBlur(),
    "solarize": dti.augment.Solarize(p=0.5),
    "erasing": dti.augment.RandomErasing(),
    "vertical": dti.augment.VerticalMirror(),
}
CROPS: dict[str, Callable[[int, int], Crop]] = {
    "resize_random_crop": lambda *larger: dti.ResizeRandomCrop(resize=larger),
    "cover_crop": lambda *_: CoverCrop(),
    "random_resized_crop": lambda *_: dti.RandomResizedCrop(),
    "random_crop": lambda *_: dti.RandomCrop(),
    "center_crop": lambda *_: CoverCrop(position="center"),
    "no_crop": lambda *_: NoCrop(),
    "letterbox": lambda *_: dti.Letterbox(),
}


def check_list(name: str, values: list[str] | None, known: list[str], where: str = "") -> list[str]:
    """Returns the values of a list flag without duplicates; all known ones if it is not given.

    Raises:
      InputError: a value is unknown, or the list is empty.
    """
    unknown = [value for value in values or [] if value not in known]
    if unknown or values == []:
        got = ", ".join(unknown) or "none"
        raise dti.InputError(f"`{name}` must be of {', '.join(known)}{where}, got {got}.")
    return list(dict.fromkeys(values or known))


def describe_work(preprocess: dti.Preprocess) -> str:
    """Returns what is done to each image, in a line."""
    (height, width), crop = preprocess.image_size, preprocess.crop
    if isinstance(crop, CoverCrop):
        crop = replace(crop, cover=crop.cover_of(preprocess.image_size))
    shown = re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.3g}", repr(crop))
    parts = ["decode", shown, f"{height}x{width}"]
    if isinstance(crop, dti.ResizeRandomCrop):
        resize = "x".join(map(str, crop.resize))
        parts = ["decode", f"resize to {resize}", f"random {height}x{width} crop"]
    parts += [preprocess.interpolation] if preprocess.interpolation != "bilinear" else []
    parts += ["antialias"] if preprocess.antialias else []
    parts += [type(augmentation).__name__ for augmentation in preprocess.augment]
    parts += ["gray"] if preprocess.channels == 1 else []
    parts += ["mirror"] if preprocess.mirror_probability else []
    normalizes = (set(preprocess.mean), set(preprocess.std)) != ({0.0}, {1.0})
    parts += ["normalize"] if preprocess.dtype != "uint8" and normalizes else []
    return ", ".join([*parts, f"{preprocess.dtype} {preprocess.layout}"])


def augment_flag(flags: Flags) -> Any:
    """Defines the flag whose value `find_augmentations` takes."""
    return flags.list("augment", [], f"Augmentations in order: any of {', '.join(AUGMENTATIONS)}.")


def find_augmentations(names: list[str]) -> tuple[Augmentation, ...]:
    """Returns the augmentations of `augment_flag`."""
    names = check_list("augment", names, [*AUGMENTATIONS]) if names else []
    return tuple(AUGMENTATIONS[name] for name in names)


class FileFlags:
    """The flags that say which records are read."""

    def __init__(self, flags: Flags) -> None:
        text = "Indexed TFRecord files, a path, URL or pattern; may be given several times."
        self.files = flags.strings("files", text)
        text = "Folder of the indexes (default: beside the files)."
        self.index_dir = flags.string("index_dir", None, text)
        text = "Feature key of the image (default: detected)."
        self.image_key = flags.string("image_key", None, text)
        self.label_key, self.label_offset = label_key_flags(flags)
        text = "Local folder for copies of remote files."
        self.cache_dir = flags.string("cache_dir", None, text)
        self.all = [flag for name, flag in vars(self).items() if name != "files"]
        self._of_records = [self.index_dir, self.image_key, self.cache_dir]

    def dataset(self, files: list[str] | None = None) -> dti.Records:
        """Describes the records in `files`, by default those of --files."""
        files = self.files.value if files is None else files
        if not files:
            raise dti.InputError("Name the TFRecord files: --files='path/train-*'")
        arguments = {flag.name: flag.value for flag in self._of_records}
        return dti.Records.from_files(files[0] if len(files) == 1 else files, **arguments)

    def label(self) -> dti.ClassLabel:
        """Returns the label that the records hold."""
        return dti.ClassLabel(key=self.label_key.value, offset=self.label_offset.value)


def label_key_flags(flags: Flags) -> tuple[Any, Any]:
    """Defines the flags for the key and the offset of the label."""
    return (
        flags.string("label_key", None, "Feature key of the label (default: detected)."),
        flags.integer(
            "label_offset", 0, "Stored label of the first class (1 in TF-slim's ImageNet)."
        ),
    )


class LabelFlags:
    """The flags that say what records hold beside the image; `files` may have some of them."""

    def __init__(self, flags: Flags, files: FileFlags | None = None) -> None:
        kinds = get_args(LabelKind)
        self.label = flags.choice("label", "class", kinds, "Label type.")
        if files:
            self.label_key, self.label_offset = files.label_key, files.label_offset
        else:
            self.label_key, self.label_offset = label_key_flags(flags)
        self.num_classes = flags.integer("num_classes", None, "Number of classes.", 1)
        text = "With --label=values, the number of values."
        self.label_size = flags.integer("label_size", None, text, 1)
        text = "File of the class names that records store as labels, one per line."
        self.vocabulary = flags.string("vocabulary", None, text)
        self.mask_key = flags.string("mask_key", None, "Feature key of the segmentation mask.")

    def make_label(self) -> Label | None:
        """Returns the label that the flags describe.

        Raises:
          InputError: a flag is missing, or is for another type of label.
        """
        kind, key = self.label.value, self.label_key.value
        integers = ("class", "multi_hot")
        for flag, kinds in (
            (self.label_size, ("values",)),
            (self.vocabulary, ("class",)),
            (self.num_classes, integers),
        ):
            if flag.value is not None and kind not in kinds:
                allowed = " and ".join(f"--label={name}" for name in kinds)
                raise dti.InputError(f"`{flag.name}` is for {allowed} only, got --label={kind}.")
        if kind == "none":
            return None
        if kind == "values":
            if self.label_size.value is None:
                raise dti.InputError("--label=values needs --label_size, how many numbers.")
            return dti.Values(key=key, size=self.label_size.value)
        fields = {"num_classes": self.num_classes.value, "offset": self.label_offset.value}
        if kind == "multi_hot":
            return dti.MultiHot(key=key, **fields)
        path = self.vocabulary.value
        names = read_class_names(local_path("vocabulary", path)) if path else None
        return dti.ClassLabel(key=key, vocabulary=names, **fields)


def make_crop(name: str, image_size: tuple[int, int]) -> Crop:
    """Returns a crop of `CROPS` for an image size, which is enlarged by 8/7 where it resizes."""
    height, width = (round(side * 256 / 224) for side in image_size)
    return CROPS[name](height, width)


class WorkFlags:
    """The flags that say what is done to each image, by default what is compared.

    That is the squeeze to 256x256 of many comparisons, without antialias and orientation, which
    hand-written pipelines leave out.
    """

    def __init__(
        self, flags: Flags, more_crops: Sequence[str] = (), *, is_compared: bool = True
    ) -> None:
        if is_compared:
            self.batch_size = flags.integer("batch_size", 64, "Images per batch.", 1)
        crops = [*CROPS, *more_crops]
        crop = crops[0] if is_compared else "cover_crop"  # the package's own default
        self.crop = flags.choice("crop", crop, crops, "How to choose the region.")
        self.image_size = flags.integer("image_size", 224, "Height and width of the output.", 1)
        text = "Antialias when downscaling."
        self.antialias = flags.boolean("antialias", not is_compared, text)
        decode = ("auto", "full", "region", "scaled")
        self.decode = flags.choice("decode", "auto", decode, "How much of each image to decode.")
        dtypes = ("float32", "float16", "uint8")
        self.dtype = flags.choice("dtype", "float32", dtypes, "Data type of the output.")
        self.augment = augment_flag(flags)
        self.all = tuple(vars(self).values())

    def preprocess(self) -> dti.Preprocess:
        """Returns what is done to each training image."""
        size = self.image_size.value
        return dti.Preprocess.for_training(
            size,
            crop=make_crop(self.crop.value, (size, size)),
            antialias=self.antialias.value,
            apply_orientation=False,
            dtype=self.dtype.value,
            augment=find_augmentations(self.augment.value),
        )
