from .bad_record import BadRecordError as BadRecordError
from .benchmark import Stats as Stats
from .benchmark import Window as Window
from .benchmark import measure as measure
from .cache import Cache as Cache
from .crops import CenterCrop as CenterCrop
from .crops import Crop as Crop
from .crops import NoCrop as NoCrop
from .crops import RandomCrop as RandomCrop
from .crops import RandomResizedCrop as RandomResizedCrop
from .crops import ResizeRandomCrop as ResizeRandomCrop
from .dataset import choose_options as choose_options
from .dataset import denormalize as denormalize
from .dataset import make_dataset as make_dataset
from .dataset import make_normalization as make_normalization
from .dataset_spec import DatasetSpec as DatasetSpec
from .distribution import distribute as distribute
from .distribution import enable_memory_growth as enable_memory_growth
from .errors import InputError as InputError
from .index.build import IndexFaultsError as IndexFaultsError
from .index.build import IndexReport as IndexReport
from .index.build import build_index as build_index
from .index.checks import Checks as Checks
from .index.files import find_files as find_files
from .index.tfrecord import BadRecord as BadRecord
from .input_profile import EpochProfile as EpochProfile
from .input_profile import InputProfile as InputProfile
from .keras_input import Distributed as Distributed
from .labels import ClassLabel as ClassLabel
from .labels import MultiHot as MultiHot
from .labels import SegmentationMask as SegmentationMask
from .labels import Stored as Stored
from .labels import Values as Values
from .options import AUTOTUNE as AUTOTUNE
from .options import DaliOptions as DaliOptions
from .options import TfDataOptions as TfDataOptions
from .options import load_options as load_options
from .options import save_options as save_options
from .order import StartStep as StartStep
from .predict import export_saved_model as export_saved_model
from .predict import export_triton as export_triton
from .predict import iterate_batches as iterate_batches
from .preprocess import IMAGENET_MEAN as IMAGENET_MEAN
from .preprocess import IMAGENET_STD as IMAGENET_STD
from .preprocess import Preprocess as Preprocess
from .resume import Resume as Resume
from .sharding import Shard as Shard
from .spec import InputSpec as InputSpec

__version__: str

__all__ = [
    "AUTOTUNE",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "BadRecord",
    "BadRecordError",
    "Cache",
    "CenterCrop",
    "Checks",
    "ClassLabel",
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
    "MultiHot",
    "NoCrop",
    "Preprocess",
    "RandomCrop",
    "RandomResizedCrop",
    "ResizeRandomCrop",
    "Resume",
    "SegmentationMask",
    "Shard",
    "StartStep",
    "Stats",
    "Stored",
    "TfDataOptions",
    "Values",
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
