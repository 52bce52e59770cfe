"""GL-Cache in both forms: blocks are grouped as they come, a model predicts what a group is worth, the worst gives its blocks up."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.policies.boosting import Forest, bin_of, fit, make_forest, predict
from analytics.policies.cursor import CAPACITY, CLOCK, HIT, KEY, Cursor, Trace, advance, enter, full, leave
from analytics.policies.queues import kernel

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

GROUPS_A_CACHE, GROUPS, FEATURES, EXAMPLES = 64, 256, 6, 2048
SNAPSHOTS_A_CACHE = 4
NONE = -1
OPEN, OPENED, VICTIM, TAKEN, FILLED, TRAINED, SNAPPED, NUMBERS = range(8)


class Groups(NamedTuple):
    """Per id: `group`, `after` (next of its group), `before` int32 · `times`, `last`: uses while resident and clock of the last.

    Per group: `head`, `members` int32 · `born`, `hits`, `recent` (hits since the last snapshot) int64 · `worth` float64 ·
    `seen` uint8[GROUPS, FEATURES] at the last snapshot, of `seen_members` blocks (0: none).
    """

    group: I32
    after: I32
    before: I32
    times: I32
    last: I64
    head: I32
    members: I32
    born: I64
    hits: I64
    recent: I64
    worth: F64
    seen: U8
    seen_members: I32
    numbers: I64


def make_groups(n_ids: int) -> Groups:
    """No group but an empty open one."""
    group, after, before = (np.full(n_ids, NONE, np.int32) for _ in range(3))
    born, hits, recent = np.zeros((3, GROUPS), np.int64)
    numbers = np.zeros(NUMBERS, np.int64)
    numbers[VICTIM] = NONE
    head, members, seen_members = np.full(GROUPS, NONE, np.int32), np.zeros(GROUPS, np.int32), np.zeros(GROUPS, np.int32)
    times, last, seen = np.zeros(n_ids, np.int32), np.zeros(n_ids, np.int64), np.zeros((GROUPS, FEATURES), np.uint8)
    worth = np.zeros(GROUPS)
    return Groups(group, after, before, times, last, head, members, born, hits, recent, worth, seen, seen_members, numbers)


def gl_cache(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """GL-Cache: groups of capacity/64 blocks entered one after the other; boosted trees predict their hits a block until the next look.

    Four times a cache-full of accesses each group is described (age, size, hits a block, recent hits a block, idle time, mean depth), and
    the description before is answered by the hits since. Groups are ranked then and after each group's worth of evictions; the lowest gives
    up its least used block that is not held. Until a model is trained worth is recent hits a block, then youth. The paper evicts whole
    segments, merging what is best of them; here blocks go one by one. Source: Yang et al., FAST 2023.
    """
    _walk(trace, cursor, make_groups(trace.parent.size), make_forest(EXAMPLES, FEATURES))


@kernel
def _walk(trace: Trace, cursor: Cursor, groups: Groups, forest: Forest) -> None:
    numbers = groups.numbers
    room, period = max(1, cursor.at[CAPACITY] // GROUPS_A_CACHE), max(1, cursor.at[CAPACITY] // SNAPSHOTS_A_CACHE)
    while advance(cursor, trace):
        key, now = cursor.at[KEY], cursor.at[CLOCK]
        if now % period == 0:
            _look(trace, cursor, groups, forest)
        if cursor.at[HIT]:
            groups.times[key] += 1
            groups.last[key] = now
            groups.hits[groups.group[key]] += 1
            groups.recent[groups.group[key]] += 1
            continue
        while full(cursor):
            victim = _victim(trace, cursor, groups, forest, room)
            _leave_group(groups, victim)
            leave(cursor, trace, victim)
        enter(cursor, trace, key)
        if numbers[OPENED] >= room:
            _open(groups, now)
        groups.times[key], groups.last[key] = 0, now
        _join(groups, key)
        numbers[OPENED] += 1


@kernel
def _open(groups: Groups, now: int) -> None:
    """Begin a new group where a number is free; else the open one grows on."""
    for g in range(GROUPS):
        if groups.members[g] == 0:
            groups.born[g], groups.hits[g], groups.recent[g], groups.seen_members[g] = now, 0, 0, 0
            groups.worth[g] = np.inf
            groups.numbers[OPEN], groups.numbers[OPENED] = g, 0
            return


@kernel
def _join(groups: Groups, key: int) -> None:
    g = groups.numbers[OPEN]
    groups.group[key], groups.after[key], groups.before[key] = g, groups.head[g], NONE
    if groups.head[g] != NONE:
        groups.before[groups.head[g]] = key
    groups.head[g] = key
    groups.members[g] += 1


@kernel
def _leave_group(groups: Groups, key: int) -> None:
    g, before, after = groups.group[key], groups.before[key], groups.after[key]
    if before == NONE:
        groups.head[g] = after
    else:
        groups.after[before] = after
    if after != NONE:
        groups.before[after] = before
    groups.members[g] -= 1


@kernel
def _look(trace: Trace, cursor: Cursor, groups: Groups, forest: Forest) -> None:
    """Answer what was seen of each group before, learn when there is enough, describe the groups now and rank them."""
    numbers = groups.numbers
    for g in range(GROUPS):
        if groups.members[g] > 0 and groups.seen_members[g] > 0:
            for i in range(FEATURES):
                forest.x[numbers[FILLED], i] = groups.seen[g, i]
            forest.y[numbers[FILLED]] = groups.recent[g] / groups.seen_members[g]
            numbers[FILLED] += 1
            if numbers[FILLED] == EXAMPLES:
                fit(forest, EXAMPLES)
                numbers[FILLED], numbers[TRAINED] = 0, numbers[TRAINED] + 1
        _describe(trace, cursor, groups, g)
        groups.seen_members[g] = groups.members[g]
        if groups.members[g] > 0:
            guess = groups.recent[g] / groups.members[g] + 1e-6 * groups.born[g] / cursor.at[CLOCK]
            groups.worth[g] = predict(forest, groups.seen[g]) if numbers[TRAINED] > 0 else guess
        groups.recent[g] = 0
    numbers[VICTIM] = NONE


@kernel
def _describe(trace: Trace, cursor: Cursor, groups: Groups, g: int) -> None:
    unit, now, members = 256.0 / cursor.at[CAPACITY], cursor.at[CLOCK], max(groups.members[g], 1)
    idle, depth, key = now, 0.0, groups.head[g]
    while key != NONE:
        idle = min(idle, now - groups.last[key])
        depth += trace.depth[key] / members
        key = groups.after[key]
    row = groups.seen[g]
    row[0], row[1] = bin_of(unit * (now - groups.born[g])), bin_of(64.0 * unit * members)
    row[2], row[3] = bin_of(16.0 * groups.hits[g] / members), bin_of(16.0 * groups.recent[g] / members)
    row[4], row[5] = bin_of(unit * idle), bin_of(depth)


@kernel
def _victim(trace: Trace, cursor: Cursor, groups: Groups, forest: Forest, room: int) -> int:
    """The least used block of the group that gives, or of the next worst where all of it is held."""
    numbers = groups.numbers
    if numbers[VICTIM] == NONE or numbers[TAKEN] >= room or groups.members[numbers[VICTIM]] == 0:
        numbers[VICTIM], numbers[TAKEN] = _worst(groups, -np.inf, NONE), 0
    g, numbers[TAKEN] = numbers[VICTIM], numbers[TAKEN] + 1
    key = _least_used(cursor, groups, g)
    if key == NONE:
        g = _worst(groups, -np.inf, NONE)
        key = _least_used(cursor, groups, g)
        while key == NONE:
            g = _worst(groups, groups.worth[g], g)
            key = _least_used(cursor, groups, g)
        numbers[VICTIM] = g
    return key


@kernel
def _worst(groups: Groups, above: float, after: int) -> int:
    """Number of the group with members of least worth; of those that come after (`above`, `after`) in that order."""
    worst = NONE
    for g in range(GROUPS):
        later = groups.worth[g] > above or (groups.worth[g] == above and g > after)
        if groups.members[g] > 0 and later and (worst == NONE or groups.worth[g] < groups.worth[worst]):
            worst = g
    return worst


@kernel
def _least_used(cursor: Cursor, groups: Groups, g: int) -> int:
    """Of a group's blocks that are not held, the least used, then the longest idle; NONE where all are held."""
    key, found = groups.head[g], NONE
    while key != NONE:
        if cursor.held[key] == 0:
            better = found == NONE or groups.times[key] < groups.times[found]
            if better or (groups.times[key] == groups.times[found] and groups.last[key] < groups.last[found]):
                found = key
        key = groups.after[key]
    return found
