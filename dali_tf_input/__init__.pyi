from .bad_record import BadRecordError
from .benchmark import Stats, Window, measure
from .crops import (
    BoxCrop,
    CenterCrop,
    Crop,
    NoCrop,
    RandomCrop,
    RandomResizedCrop,
    ResizeRandomCrop,
)
from .dataset import choose_options, denormalize, make_dataset, make_normalization
from .distribution import distribute, enable_memory_growth
from .errors import InputError
from .index.build import IndexFaultsError, IndexReport, build_index
from .index.checks import Checks
from .index.files import find_files
from .index.tfrecord import BadRecord
from .input_profile import EpochProfile, InputProfile
from .keras_input import Distributed
from .options import AUTOTUNE, DaliOptions, TfDataOptions, load_options, save_options
from .order import StartStep
from .predict import export_saved_model, export_triton, iterate_batches
from .preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from .resume import Resume
from .sharding import Shard
from .spec import DatasetSpec, InputSpec

__version__: str

__all__ = [
    "AUTOTUNE",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "BadRecord",
    "BadRecordError",
    "BoxCrop",
    "CenterCrop",
    "Checks",
    "Crop",
    "DaliOptions",
    "DatasetSpec",
    "Distributed",
    "EpochProfile",
    "IndexFaultsError",
    "IndexReport",
    "InputError",
    "InputProfile",
    "InputSpec",
    "NoCrop",
    "Preprocess",
    "RandomCrop",
    "RandomResizedCrop",
    "ResizeRandomCrop",
    "Resume",
    "Shard",
    "StartStep",
    "Stats",
    "TfDataOptions",
    "Window",
    "build_index",
    "choose_options",
    "denormalize",
    "distribute",
    "enable_memory_growth",
    "export_saved_model",
    "export_triton",
    "find_files",
    "iterate_batches",
    "load_options",
    "make_dataset",
    "make_normalization",
    "measure",
    "save_options",
]
