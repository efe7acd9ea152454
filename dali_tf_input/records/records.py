"""The records of a dataset: which ones of the indexed files, and what is known about them."""

import functools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from dali_tf_input.errors import Count, InputError, Path, Within, check, checked
from dali_tf_input.random import Integers, Unsigned
from dali_tf_input.records import contents, subsets
from dali_tf_input.records.checks import PIXELS_KEY, missing_key_error
from dali_tf_input.records.class_names import Names, find_difference, join_names, move_names
from dali_tf_input.records.contents import Counts, FeatureStats
from dali_tf_input.records.indexed_file import Mask
from dali_tf_input.records.indexed_files import IndexedFiles
from dali_tf_input.records.labels import Lengths, describe_list
from dali_tf_input.records.manifest import read_entries
from dali_tf_input.records.opening import read_fields
from dali_tf_input.records.paths import index_command
from dali_tf_input.storage.objects import RETRY_SECONDS, check_path


@checked
@dataclass(frozen=True, kw_only=True, repr=False)
class Records(IndexedFiles):
    """The records of indexed TFRecord files, or a subset of them. Made by `from_files`.

    A record's id is its position among all records of the files, from 0, counting the bad ones that
    the index skips. So it is the same in every subset, and stays the same when the index skips
    another record later. A record's name, its file and its number there, stays the same when files
    are added, too: `locate` returns it, and `select`, `exclude` and `relabel` take it.

    `split`, `sample` and similar methods return `Records` too, which all functions accept.

    Examples:
      >>> records = Records.from_files("records/train-*")
      >>> records.num_records
      24
      >>> label = records.read(0)["image/class/label"]
      >>> rest = records.exclude([7, ("train-00000-of-00001", 3)])  # by id, or by name
      >>> train, held_out = records.split(train=0.75, held_out=0.25).values()
      >>> train.num_records + held_out.num_records
      24

    Attributes:
      files: the files, sorted by path.
      subset: which of their records, a bit for each id; None is all of them.
      label_key: the feature key of `labels`; None if the index step did not read them.
      label_vocabulary: the names of the classes in the order of `labels`, if records store names.
      relabeled: whether `relabel` replaced the stored `labels`.
      names: the names of the classes, if `relabel` or a union changed them, () if they are not
        known then; None if they are those beside the files.
      lineage: the seeds of the splits that led to this subset, so that the next split draws other
        numbers.
      image_key: feature key of the encoded image, a bytes_list of one value.
      other_image_keys: further such keys, of a union of records that differ in them.
      largest_image: the largest height and the largest width of the images, in pixels; None unless
        all files were checked at level "decode". DALI's GPU decoder allocates memory for it.
      index_dir: the folder of the index files, as given; None means beside each file.
      cache_dir: the folder of complete local copies of stored objects; None reads byte ranges of
        the objects.
      retry_seconds: how long to retry an object whose store does not answer.
      features: what is known about each feature key: from all records at level "schema" and above,
        otherwise from a sample.
    """

    image_key: str
    largest_image: tuple[int, int] | None = None
    features: dict[str, FeatureStats] = field(default_factory=dict, hash=False, repr=False)
    subset: bytes | None = field(default=None, repr=False)
    label_key: str | None = None
    label_vocabulary: tuple[str, ...] | None = None
    relabeled: bool = False
    names: Names | None = None
    lineage: str = field(default="", compare=False)
    other_image_keys: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Says in one line how many records of which files."""
        of = "" if self.subset is None else f" of {self.num_all:,}"
        files = f"{len(self.files):,} file{'s'[: len(self.files) - 1]}"
        return f"<Records: {self.num_records:,}{of} in {files}, {self.files[0].path} first>"

    @property
    def image_keys(self) -> tuple[str, ...]:
        """The feature keys of images: a record has its image at one of them."""
        return (self.image_key, *self.other_image_keys)

    @functools.cached_property
    def class_names(self) -> Names | None:
        """The names of the classes, by their stored labels; None where one is not known.

        They are in ``labels.txt``, or tfds' ``label.labels.txt``, beside the files, or in the
        vocabulary that the records were indexed with; and they move with the labels in `relabel`.

        Raises:
          InputError: a file of names cannot be read, is not UTF-8, or has an empty line; or files
            in several folders name a class differently.
        """
        if self.names is not None:
            return self.names or None
        own = self.find_names(self.label_key) if self.label_key else None
        return self.label_vocabulary or own or self.find_names()

    @property
    def num_records(self) -> int:
        """How many records there are, without skipped ones."""
        if self.subset is None:
            return sum(file.num_records for file in self.files)
        return len(self.ids)

    @property
    def stores_pixels(self) -> bool:
        """Whether images are stored as pixels, see ``dali-tf-input convert --store=pixels``."""
        return self.image_key == PIXELS_KEY

    @functools.cached_property
    def ids(self) -> Integers:
        """The ids of the records, ascending: int64 (num_records,)."""
        return np.flatnonzero(self._mask)

    def ids_at(self, positions: Integers) -> Integers:
        """Returns the ids of the records at some positions among these records, from 0."""
        has_gaps = self.subset is not None or self.num_skipped
        return self.ids[positions] if has_gaps else positions

    @functools.cached_property
    def counts(self) -> list[int]:
        """How many of the records are in each file."""
        if self.subset is None:
            return [file.num_records for file in self.files]
        counts: list[int] = np.diff(np.searchsorted(self.ids, self._ends), prepend=0).tolist()
        return counts

    @property
    def labels(self) -> Integers:
        """The stored label of each record, or a new one: int64 (num_records,), as `ids`.

        Labels that are stored as names count as the positions of the names in the vocabulary that
        the records were indexed with.

        Raises:
          InputError: a file was not indexed at level "schema" with a `ClassLabel`.
        """
        return np.concatenate(self._labels_of_files())[self._mask[self._is_valid]]

    @functools.cached_property
    def label_counts(self) -> Counts | None:
        """The labels that occur, in order, and how often; None if an index lacks `labels`."""
        if any(file.labels is None for file in self.files):
            return None
        pairs = zip(*np.unique(self.labels, return_counts=True), strict=True)
        return tuple((int(label), int(count)) for label, count in pairs)

    def _labels_of_files(self) -> list[Integers]:
        labels = []
        for file in self.files:
            try:
                labels.append(contents.unpack_integers(file.labels or b""))
                check(len(labels[-1]) == file.num_records, "labels", "one a record", file.path)
            except (TypeError, ValueError) as error:
                paths = self.paths
                if self.other_image_keys:  # a run is for files with the same keys
                    folder = os.path.dirname(file.path)
                    paths = tuple(path for path in paths if os.path.dirname(path) == folder)
                arguments = ["--verify=schema"]
                command = index_command(paths, index_dir=self.index_dir, arguments=arguments)
                text = f"The index of {file.path} does not have a class for each record"
                raise InputError(f"{text}. If each has one, index again: {command}") from error
        return labels

    @checked
    def index(self, number: int) -> Integers:
        """Returns offset and size in bytes of each record of a file: int64 (counts[number], 2)."""
        check(0 <= number < len(self.files), "number", f"in [0, {len(self.files)})", number)
        file, end = self.files[number], self._ends[number]
        extents = file.index()
        if self.subset is None:
            return extents
        return extents[self._mask[end - file.num_framed : end][file.is_valid]]

    @checked
    def sample(self, num_records: Count, *, by_label: bool = False, seed: int = 0) -> "Records":
        """Returns so many random records, the same for any order of the files.

        Examples:
          >>> records = Records.from_files("records/train-*")
          >>> records.sample(6).num_records
          6

        Args:
          num_records: how many, in [1, number of these records].
          by_label: whether each class has its share, to within one record.
          seed: the random seed, in [0, 2**31).

        Raises:
          InputError: as for `split`, or there are fewer records.
        """
        rule = f"in [1, {self.num_records:,}]"
        check(num_records <= self.num_records, "num_records", rule, num_records)
        classes = self.labels if by_label else None
        mask = subsets.take_first(self._draw(seed), num_records, classes)
        return self._keep(mask, "num_records", seed)

    @checked
    def sample_fraction(
        self, fraction: float, *, by_label: bool = False, seed: int = 0
    ) -> "Records":
        """Returns a random share of the records; chosen ones stay chosen when files are added.

        Each record is chosen independently, so their number is approximate, unless `by_label`.

        Examples:
          >>> records = Records.from_files("records/train-*")
          >>> half = records.sample_fraction(0.5)

        Args:
          fraction: the share, in (0, 1].
          by_label: whether each class has its share, to within one record.
          seed: the random seed, in [0, 2**31). The share is the first part of a `split` with the
            same seed.

        Raises:
          InputError: as for `split`.
        """
        check(0 < fraction <= 1, "fraction", "in (0, 1]", fraction)
        if fraction == 1:
            return self
        return self._divide(["fraction"], [fraction, 1 - fraction], by_label, seed)[0]

    @checked
    def split(
        self,
        *,
        by_label: bool = False,
        group_key: str | None = None,
        seed: int = 0,
        **shares: float,
    ) -> "dict[str, Records]":
        """Divides the records at random into disjoint parts.

        The part of a record depends only on the name of its file, its offset in the file, and the
        seed. So it does not change when files are added, moved to another folder or indexed again.

        Examples:
          >>> records = Records.from_files("records/train-*")
          >>> parts = records.split(train=0.75, held_out=0.25)
          >>> spec = InputSpec.for_training(parts["train"], 224)

        Args:
          by_label: whether each part has its share of each class, to within one record, and its
            share of all records. Adding files then moves a few records between the parts. Needs an
            index of level "schema" with a `ClassLabel`.
          group_key: a feature key, such as "image/group", which `convert` writes: records with the
            same value of it stay together. The part then depends only on that value and the seed.
            This reads all records, some thousands a second.
          seed: the random seed, in [0, 2**31).
          **shares: the share of each part, by name. Each is in (0, 1], and they sum to 1.

        Returns:
          The parts by their names.

        Raises:
          InputError: the shares are not as above, a part would be empty, an index lacks labels, or
            a record has no value of `group_key`.
        """
        subsets.check_shares(shares)
        parts = self._divide([*shares], [*shares.values()], by_label, seed, group_key)
        return dict(zip(shares, parts, strict=True))

    @checked
    def folds(
        self,
        num_folds: Annotated[int, Within(2)],
        *,
        by_label: bool = False,
        group_key: str | None = None,
        seed: int = 0,
    ) -> "list[tuple[Records, Records]]":
        """Returns the (training, held out) records of each fold of a cross-validation.

        Each record is held out once. Arguments and errors are those of `split`.

        Examples:
          >>> records = Records.from_files("records/train-*")
          >>> for train, held_out in records.folds(3):
          ...     assert train.num_records + held_out.num_records == 24
        """
        rule = f"at most the {self.num_records:,} records"
        check(num_folds <= self.num_records, "num_folds", rule, num_folds)
        shares = [1 / num_folds] * num_folds
        parts = self._divide(["num_folds"] * num_folds, shares, by_label, seed, group_key)
        return [(replace(self.exclude(part.ids), lineage=part.lineage), part) for part in parts]

    @checked
    def filter(self, *, labels: Iterable[int]) -> "Records":
        """Returns the records of some classes, named by their stored labels.

        Examples:
          >>> records = Records.from_files("records/train-*")
          >>> some = records.filter(labels={3, 7})

        Raises:
          InputError: a class has no records, or an index lacks labels, see `labels`.
        """
        own = self.labels
        wanted = subsets.check_integers("labels", labels)
        missing = np.setdiff1d(wanted, own).tolist()
        rule = f"stored labels of these records, which run from {own.min()} to {own.max()}"
        check(bool(len(wanted)) and not missing, "labels", rule, missing[:10])
        return self._keep(np.isin(own, wanted), "labels")

    @checked
    def select(self, ids: Iterable[Any]) -> "Records":
        """Returns the records with these ids or names, see `find`.

        Raises:
          InputError: one is not among these records, or is skipped by the index.
        """
        wanted = self.find(ids)
        missing = np.setdiff1d(wanted, self.ids)
        skipped = missing[~self._is_valid[missing]]
        rule = f"ids of these {self.num_records:,} records"
        if len(skipped):
            rule, missing = "ids of records that the index does not skip", skipped
        check(not len(missing), "ids", rule, ", ".join(map(str, missing[:10])))
        return self._keep(np.isin(self.ids, wanted), "ids")

    @checked
    def exclude(self, ids: Iterable[Any]) -> "Records":
        """Returns the records except those with these ids or names, see `find`.

        They need not be in the subset, and the index may skip them.

        Raises:
          InputError: an id or name does not belong to these files, or no record remains.
        """
        return self._keep(~np.isin(self.ids, self.find(ids)), "exclude")

    @checked
    def relabel(
        self,
        labels: Mapping[int, int] | None = None,
        *,
        ids: Mapping[Any, int] | None = None,
        names: Sequence[str | None] | None = None,
    ) -> "Records":
        """Returns these records with other labels; the files are not changed.

        Use it to mix datasets that number their classes differently, or to correct wrong labels.
        The names of the classes move with them. Order "buffer" serves only stored labels, and
        rejects relabeled records.

        Examples:
          >>> records = Records.from_files("records/train-*")
          >>> drawings = records.relabel({1: 101, 2: 102})
          >>> corrected = records.relabel(ids={7: 3})

        Args:
          labels: the new label of a stored one; others stay.
          ids: the new label of single records, by their ids or names, see `find`. The index may
            skip them.
          names: the names of the classes in the order of their new labels, such as the
            `class_names` of other records: classes are numbered by their names.

        Raises:
          InputError: an id or a label does not occur, a new label is not an integer, or an index
            lacks labels, see `labels`; or the name of a class is not known, is not in `names`, or
            occurs twice.
        """
        now = np.concatenate(self._labels_of_files())
        if names is not None:
            rule = "given without `labels` and `ids`"
            check(labels is None and ids is None, "names", rule, names)
            labels = self._number_by(names, np.unique(self.labels).tolist())
        changed = now.copy()
        for label, new in (labels or {}).items():
            check(bool((now == label).any()), "labels", "labels of these records", label)
            changed[now == label] = subsets.check_label(new)
        of_all = np.zeros(self.num_all, np.int64)
        of_all[self._is_valid] = changed
        for record, new in (ids or {}).items():
            of_all[self.find([record])] = subsets.check_label(new)
        moved = {int(label): int(new) for label, new in (labels or {}).items()}
        named: Names | None = None if names is None else tuple(names)
        if named is None and (known := self.class_names):
            # What classes without records are called says nothing of those that move there.
            empty = {*moved.values()} - {*np.unique(self.labels).tolist()}
            named = move_names(known, moved, {*range(len(known))} - {*moved} - empty)
        parts = np.split(of_all[self._is_valid], np.cumsum(self._num_valid)[:-1])
        files = [
            replace(file, labels=contents.pack_integers(part))
            for file, part in zip(self.files, parts, strict=True)
        ]
        return replace(self, files=tuple(files), relabeled=True, names=named)

    def _number_by(self, names: Sequence[str | None], labels: Sequence[int]) -> dict[int, int]:
        """Returns the new number of each of the labels, by the names of the classes."""
        known = self.class_names
        if known is None:
            raise InputError(
                "`names` numbers classes by their names, and those of these records are not known:"
                " write them to labels.txt beside the files, one per line, in the order of labels."
            )
        numbers = {}
        for label in labels:
            name = known[label] if 0 <= label < len(known) else None
            found = [number for number, one in enumerate(names) if one == name]
            found = [] if name is None else found
            rule = f"names of all classes of these records, once each: class {label} is {name!r}"
            check(len(found) == 1, "names", rule, [*names][:20])
            numbers[label] = found[0]
        return numbers

    def __add__(self, other: "Records") -> "Records":
        """Returns `union(other)`."""
        return self.union(other) if isinstance(other, Records) else NotImplemented

    @checked
    def union(self, other: "Records", *, compare: bool = True) -> "Records":
        """Returns the union of two disjoint sets of records, also as ``records + other``.

        Ids count over the files of both, so a record may have another one than before; its name
        stays the same.

        If their feature keys differ, labels come from the index, as after `relabel`.

        Args:
          other: the other records.
          compare: whether both must name equal labels equally, as far as names are known.

        Raises:
          InputError: they share a record, differ in how they are read, or number classes
            differently.
        """
        names = (self.class_names, other.class_names) if compare else (None, None)
        of_files = self.names is None and other.names is None
        number = find_difference(*names)
        if number is not None and names[0] and names[1]:
            raise InputError(
                f"Label {number} is {names[0][number]!r} in {os.path.dirname(self.paths[0])}, and"
                f" {names[1][number]!r} in {os.path.dirname(other.paths[0])}. Number one like the"
                " other: other.relabel(names=records.class_names). Or, if that is right,"
                " records.union(other, compare=False)"
            )
        for name in ("index_dir", "cache_dir", "is_remote", "stores_pixels"):
            mine, theirs = getattr(self, name), getattr(other, name)
            check(mine == theirs, name, f"the same for both, {mine!r}", repr(theirs))
        for one, another in ((self, other), (other, self)):
            for key in {*another.image_keys} - {*one.image_keys} & {*one.features}:
                raise InputError(
                    f"`image_key` '{key}' of some of the records is a feature of the others too,"
                    f" whose images are in '{one.image_key}': which one is meant is not known."
                )
        image_keys = tuple(dict.fromkeys(self.image_keys + other.image_keys))
        is_unknown = self.label_key is None and len(image_keys) > 1
        has_other_labels = self.label_key != other.label_key or is_unknown
        theirs = other._mask  # noqa: SLF001
        files, mask = subsets.unite(self.files, self._mask, other.files, theirs)
        if len(files) in (len(self.files), len(other.files)):  # one has all
            whole = self if len(files) == len(self.files) else other
            features, largest = whole.features, whole.largest_image
        elif len(files) == len(self.files) + len(other.files):
            features = contents.merge_all_features(self.features, other.features)
            largest = contents.merge_sizes(self.largest_image, other.largest_image)
        else:
            raise InputError(
                "Each has files that the other has too, and files of its own: make both from one"
                " Records.from_files(...) of all, by select(ids)."
            )
        lineages = sorted({self.lineage, other.lineage})
        num_valid = sum(file.num_records for file in files)
        subset = None if np.count_nonzero(mask) == num_valid else subsets.pack_mask(mask)
        return replace(
            self,
            files=files,
            features=features,
            largest_image=largest,
            stored_names={**self.stored_names, **other.stored_names},
            subset=subset,
            relabeled=self.relabeled or other.relabeled or has_other_labels,
            names=None if of_files and compare else join_names(*names) or (),
            other_image_keys=image_keys[1:],
            lineage="".join(lineages) if subset else "",
        )

    def _draw(self, seed: int, group_key: str | None = None) -> Unsigned:
        check(0 <= seed < 2**31, "seed", "in [0, 2**31)", seed)
        if group_key is not None:
            groups = (self._group_of(record, group_key) for record in self.ids.tolist())
            return subsets.draw_split_keys_of_groups(groups, f"{self.lineage}{seed}")
        keys = subsets.draw_split_keys(self.files, f"{self.lineage}{seed}")
        return keys[self._mask[self._is_valid]]

    def _group_of(self, record: int, key: str) -> bytes:
        """Returns the group of a record, as text."""
        values = self.read(record).get(key, ())
        if len(values) != 1:
            file, number, _, _ = self.locate(record)
            rule = f"a feature with one value in all records; record {number} of {file} has"
            raise InputError(f"`group_key` must be {rule} {len(values)} values of {key!r}.")
        return values[0] if isinstance(values[0], bytes) else repr(values[0]).encode()

    def _divide(
        self,
        names: Sequence[str],
        shares: Sequence[float],
        by_label: bool,
        seed: int,
        group_key: str | None = None,
    ) -> "list[Records]":
        """Returns a part for each of `names`."""
        if by_label and group_key is not None:
            raise InputError("Records are divided `by_label` or by `group_key`, not by both.")
        classes = self.labels if by_label else None
        parts = subsets.divide(self._draw(seed, group_key), shares, classes)
        return [self._keep(parts == part, name, seed) for part, name in enumerate(names)]

    def _keep(self, mask: Mask, name: str, seed: int | None = None) -> "Records":
        """Returns the records for which bool (num_records,) is True; `name` asked for them."""
        if not mask.any():
            raise InputError(f"`{name}` leaves none of these {self.num_records:,} records.")
        if mask.all():
            return self
        whole = np.zeros(self.num_all, bool)
        whole[self.ids[mask]] = True
        lineage = self.lineage if seed is None else f"{self.lineage}{seed},"
        return replace(self, subset=subsets.pack_mask(whole), lineage=lineage)

    @property
    def _mask(self) -> Mask:
        """Whether each record of the files is one of these: bool, one for each id."""
        if self.subset is None:
            return self._is_valid
        return subsets.unpack_mask(self.subset, self.num_all)

    def dtype_of(self, key: str) -> str:
        """Returns the type of a feature's values: "string", "float32" or "int64"."""
        kinds = self.features[key].kinds if key in self.features else ()
        return {"bytes_list": "string", "float_list": "float32"}.get("".join(kinds), "int64")

    def check_feature(
        self,
        name: str,
        key: str,
        kinds: Collection[str],
        lengths: Lengths,
        *,
        may_lack: bool = False,
    ) -> None:
        """Checks that records hold a list of one of `kinds` at `key`, as far as they were read.

        With `may_lack` some of them may have no such feature.

        Raises:
          InputError: one does not; `name` is the argument that named the key.
        """

        def fits(feature: FeatureStats | None) -> bool:
            if feature is None or not {*feature.kinds} <= {*kinds}:
                return False
            return lengths[0] <= feature.lengths[0] and feature.lengths[1] <= lengths[1]

        if not self.features:
            return  # made by hand
        if key not in self.features:
            raise missing_key_error(name, key, self.features)
        if fits(self.features[key]) and (may_lack or self.features[key].first_without is None):
            return
        place, arguments = self.index_dir, ["--verify=schema"]
        command = index_command(self.paths, index_dir=place, arguments=arguments)
        versions = {file.path: file.version for file in self.files}
        index_files = [file.index_file for file in self.files]
        entries = read_entries(versions, index_files, self.paths, place)
        for path, entry in zip(self.paths, entries, strict=True):
            feature = entry.features.get(key)
            if may_lack and feature is None:
                continue
            if feature is None or (feature.first_without is not None and not may_lack):
                record = feature.first_without if feature else 0
                problem = f"is not in record {record} of {path}"
            elif not fits(feature):
                kinds_found = " or ".join(kind or "an empty feature" for kind in feature.kinds)
                due = describe_list([*kinds], lengths)
                problem = f"must be {due}, found {kinds_found} of {feature.lengths[1]} in {path}"
            else:
                continue
            raise InputError(f"`{name}` '{key}' {problem}. To see all that is wrong: {command}")

    @classmethod
    @checked
    def from_files(
        cls,
        files: Path | Sequence[Path],
        *,
        index_dir: Path | None = None,
        image_key: str | None = None,
        cache_dir: Path | None = None,
        retry_seconds: Annotated[float, Within(0)] = RETRY_SECONDS,
    ) -> "Records":
        """Opens indexed TFRecord files through the manifest beside their indexes.

        It checks that no file and no index has changed since it was indexed. What records hold is
        known from the index step: from all records at level "schema" and above, otherwise from a
        sample of each file. If a record outside the sample lacks the label, tf.data raises an
        error, but DALI serves an arbitrary number.

        Args:
          files: a path, a URL of an object (s3://, gs://, az://, https://), a pattern, or several
            of them. Index files that match are ignored.
          index_dir: the folder of the index files, which may be in a store; None means beside each
            file, as ``<file>.idx``.
          image_key: feature key of the image; None finds TF-slim's "image/encoded" or tfds'
            "image".
          cache_dir: a local folder for complete copies of stored objects, which processes may
            share. Every order then reads the copies. None reads ranges of the objects, which order
            "buffer" cannot.
          retry_seconds: how long to retry an object whose store does not answer, at least 0.

        Raises:
          InputError: no file matches, an index is missing, a file or its index changed, a record
            lacks the image, or files in several folders name a class differently. `InputSpec`
            checks labels.
        """
        check_path("index_dir", index_dir)
        check_path("cache_dir", cache_dir)
        check(image_key != "", "image_key", "None, or not empty", "''")
        fields = read_fields(files, index_dir=index_dir, image_key=image_key, cache_dir=cache_dir)
        records = cls(**fields, retry_seconds=retry_seconds)
        records.check_feature("image_key", records.image_key, ("bytes_list",), (1, 1))
        if len({os.path.dirname(path) for path in records.paths}) > 1:
            _ = records.class_names  # raises if folders name classes differently
        return records
