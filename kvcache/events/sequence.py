"""One worker's event batches, in order and without gaps: what may be applied, and what is to be asked for again.

A gap in the sequence asks for a replay, a sequence that runs backwards is a new engine, and whatever is lost for good
makes the worker's blocks unknown: they are dropped, so that nobody counts on them. The same goes for a payload that
can't be read, which may have held removals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from prefixwatch.kvcache.events.pending import AttentionGroups, ParkedRuns
from prefixwatch.kvcache.events.wire import Cleared, EventDecodeError, Removed, Stored, Tier, Unreadable, decode_batch

_REMEMBERED_BATCHES = 2048


@dataclass(slots=True)
class FeedCounters:
    """Totals since the feed was made. Blocks are counted in our size, on all tiers together."""

    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    missed_batches: int = 0
    """Sequence numbers that a gap left out, whether or not a replay brought them later."""
    lost_batches: int = 0
    """Those of them that no replay brought."""
    replayed_batches: int = 0
    restarts: int = 0
    unknown_parents: int = 0
    """Stored runs dropped because the block before them never turned up."""
    ignored_events: int = 0
    """Events of no use to a prefix index: unknown types, other attention groups, tiers that aren't tracked."""
    malformed_batches: int = 0
    """Payloads that can't be read and may have held removals: each made everything known of the worker be dropped."""
    malformed_events: int = 0
    """Stored runs that can't be read; they were left out."""
    stale_batches: int = 0
    """Batches of an earlier generation, or after the worker left."""
    cleared: int = 0
    """Times that everything known of the worker was dropped, for whichever reason."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask the engine for its batches again from this sequence number on.

    The first one asked for is the last one known: if the engine's differs, it is a new engine.
    """

    from_sequence: int


@dataclass(slots=True)
class Applied:
    """What one batch changed, in chain hashes of ours on all tiers, and what is to be done next."""

    stored: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    cleared: bool = False
    replayed: bool = False
    """Reported again by the engine's replay: it happened earlier, perhaps before this subscriber joined."""
    replay: Replay | None = None
    timestamp: float | None = None
    """The engine's clock at the batch, in Unix seconds."""


class EventSequence(ABC):
    """State of one engine's event stream. One data-parallel rank is one worker.

    A *generation* is one life of the engine: what is said of an earlier one, or after `close`, changes nothing.
    Subclasses keep the blocks; this class decides which events count at all.
    """

    def __init__(self, worker: str, tiers: Collection[Tier] = (Tier.GPU,)) -> None:
        """Events of tiers other than `tiers` are ignored."""
        self.worker = worker
        self._tiers = tiers
        self.generation = 1
        self.counters = FeedCounters()
        self.last_sequence: int | None = None
        self.unsure = False
        """A gap was seen and not yet closed: more may be believed of this worker than it holds."""
        self.incomplete = False
        """Batches before those that were seen never came: the worker may hold blocks that aren't known."""
        self.unreadable: str | None = None
        """Why an event, or a whole payload, could not be read; the last reason, None if there was none."""
        self._parked: ParkedRuns[Stored] = ParkedRuns()
        self._groups = AttentionGroups()
        self._seen = _Digests()
        self._any_base = False
        self._lost_after: int | None = None
        self._closed = False

    @property
    def parked(self) -> int:
        """Stored runs that wait for their parent."""
        return len(self._parked)

    @property
    def hybrid(self) -> bool:
        """Whether the model has cache groups besides full attention.

        They limit what can be reused of a prefix (a recurrent group resumes at its last checkpoint only), so that
        full-attention blocks over-credit the worker.
        """
        return self._groups.others

    def expire(self, now_seconds: float) -> None:
        """Drop the blocks that have waited too long for their parent."""
        self.counters.unknown_parents += self._parked.expire(now_seconds)

    @abstractmethod
    def _apply_events(self, events: Sequence[Stored | Removed | Cleared], now_seconds: float, done: Applied) -> None:
        """Do what the events of one batch say. Raises EventDecodeError where that can't be known, with removals
        possibly among what is lost."""

    @abstractmethod
    def _forget_blocks(self) -> None:
        """The worker holds nothing that is known."""

    @abstractmethod
    def _leave(self) -> None:
        """The worker no longer belongs to the fleet."""

    def apply(
        self,
        sequence: int,
        payload: bytes,
        now_seconds: float,
        *,
        replayed: bool = False,
        generation: int | None = None,
    ) -> Applied:
        """Take one batch; `now_seconds` is any clock that doesn't run backwards.

        Where the answer asks for a replay, nothing was applied: feed the replayed batches here with
        `replayed=True`, or call `lost` and apply this batch again. A batch seen before changes nothing.
        Raises BlockSizeMismatch.
        """
        if not self._admits(generation):
            self.counters.stale_batches += 1
            return Applied()
        digest = xxh3_64_intdigest(payload)
        if self._seen.has(sequence, digest):
            return Applied()
        done = Applied(replayed=replayed)
        done.replay = self._replay_needed(sequence, replayed, done)
        if done.replay is not None:
            return done
        self._count_lost(sequence)
        if self.last_sequence is None:
            self.incomplete = sequence > 0
        self.last_sequence, self._any_base, self.unsure = sequence, False, False
        self._seen.add(sequence, digest)
        self.counters.batches += 1
        self.counters.replayed_batches += replayed
        self._apply_payload(payload, now_seconds, done)
        return done

    def _apply_payload(self, payload: bytes, now_seconds: float, done: Applied) -> None:
        self.expire(now_seconds)
        try:
            batch = decode_batch(payload)
            self.counters.ignored_events += batch.unknown_events
            done.timestamp = batch.ts
            useful = [event for event in batch.events if isinstance(event, Cleared) or self._useful(event)]
            self._apply_events(useful, now_seconds, done)  # type: ignore[arg-type]  # no Unreadable is useful
        except EventDecodeError as error:  # it may have held removals
            self.counters.malformed_batches += 1
            self.unreadable = str(error)
            self._drop_all()
            done.cleared = True

    def _useful(self, event: Stored | Removed | Unreadable) -> bool:
        """Whether an event counts. Raises EventDecodeError for one that can't be read and may have been a removal.

        Groups come first: a hybrid model's recurrent groups have shapes of their own.
        """
        attention = None if isinstance(event, Removed) else event.attention
        if not self._groups.full(event.group_index, attention) or event.tier not in self._tiers:
            self.counters.ignored_events += 1
            return False
        if not isinstance(event, Unreadable):
            return True
        if not event.harmless:
            raise EventDecodeError(event.reason)
        self._leave_out(event.reason)
        return False

    def _leave_out(self, reason: str) -> None:
        """Stored blocks can't be read: they stay unknown, which only makes the index claim less."""
        self.counters.malformed_events += 1
        self.unreadable = reason

    def lost(self, *, generation: int | None = None) -> None:
        """Batches are gone for good: drop the worker's blocks and begin again with whichever batch comes next."""
        if self._admits(generation):
            self._lost_after = self.last_sequence
            self._drop_all()
            self._forget_sequence()
            self._any_base, self.incomplete = True, True

    def restart(self, generation: int | None = None) -> bool:
        """The engine began a new life, so its cache is empty. A generation that isn't newer is ignored."""
        new = self.generation + 1 if generation is None else generation
        if new <= self.generation:
            return False
        self.generation, self._closed = new, False
        self.counters.restarts += 1
        self._drop_all()
        self._forget_sequence()
        self._lost_after, self.incomplete = None, False
        return True

    def close(self, *, generation: int | None = None) -> None:
        """The worker left the fleet; only `restart`, or a batch of a newer generation, brings it back."""
        if not self._closed and self._admits(generation):
            self._drop_all()
            self._forget_sequence()
            self._leave()
            self._closed = True

    def _admits(self, generation: int | None) -> bool:
        if generation is not None:
            self.restart(generation)
            if generation < self.generation:
                return False
        return not self._closed

    def _replay_needed(self, sequence: int, replayed: bool, done: Applied) -> Replay | None:
        last = self.last_sequence
        if last is not None and sequence <= last:
            self.restart()
            done.cleared = True
            return Replay(0) if sequence else None
        if replayed or self._any_base:
            if last is not None and sequence > last + 1:  # the engine no longer has what is missing
                self._drop_all()
                done.cleared, self.incomplete = True, True
                self._lost_after = last
            return None
        if last is None:
            return Replay(0) if sequence else None
        if sequence == last + 1:
            return None
        if not self.unsure:
            self.counters.missed_batches += sequence - last - 1
            self.unsure = True
        return Replay(last)

    def _drop_all(self) -> None:
        self._forget_blocks()
        self.counters.cleared += 1

    def _count_lost(self, sequence: int) -> None:
        """Batches between the last one before a loss and the first one after it."""
        after, self._lost_after = self._lost_after, None
        if after is not None and sequence > after + 1:
            self.counters.lost_batches += sequence - after - 1

    def _forget_sequence(self) -> None:
        self.last_sequence, self.unsure, self._any_base = None, False, False
        self._seen = _Digests()


class _Digests:
    """Digests of the last batches, 16 bytes each: there is one of these for every engine of a fleet."""

    def __init__(self) -> None:
        self._pairs = array("Q")

    def add(self, sequence: int, digest: int) -> None:
        place = 2 * (sequence % _REMEMBERED_BATCHES)
        if place >= len(self._pairs):
            self._pairs.extend(bytes(place + 2 - len(self._pairs)))
        self._pairs[place], self._pairs[place + 1] = (sequence + 1) % 2**64, digest

    def has(self, sequence: int, digest: int) -> bool:
        place = 2 * (sequence % _REMEMBERED_BATCHES)
        return place < len(self._pairs) and (
            self._pairs[place] == (sequence + 1) % 2**64 and self._pairs[place + 1] == digest
        )
