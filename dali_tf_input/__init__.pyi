from .backends.build import make_dataset as make_dataset
from .errors import InputError as InputError
from .index.build import build_index as build_index
from .records.labels import ClassLabel as ClassLabel
from .records.labels import MultiHot as MultiHot
from .records.labels import SegmentationMask as SegmentationMask
from .records.labels import Stored as Stored
from .records.labels import Values as Values
from .records.records import Records as Records
from .records.schema import Checks as Checks
from .serving import export_saved_model as export_saved_model
from .serving import iterate_batches as iterate_batches
from .spec.crops import CenterCrop as CenterCrop
from .spec.crops import RandomCrop as RandomCrop
from .spec.crops import RandomResizedCrop as RandomResizedCrop
from .spec.crops import ResizeRandomCrop as ResizeRandomCrop
from .spec.input import InputSpec as InputSpec
from .spec.options import DaliOptions as DaliOptions
from .spec.options import TfDataOptions as TfDataOptions
from .spec.order import Shard as Shard
from .spec.preprocess import Preprocess as Preprocess
from .training.failures import BadRecordError as BadRecordError
from .training.input import Input as Input
from .training.load import load as load
from .training.resume import Resume as Resume

__version__: str
