# SPDX-License-Identifier: Apache-2.0
"""Launch configurations of the attention kernels, from sizes that the host knows."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Launch configuration.

    Attributes:
        rows: query rows of a program.
        keys: keys it holds at once.
        stages: of the pipeline that loads them.
        warps: of a program.
        splits: programs that share the keys of a part of a tile.
    """

    rows: int
    keys: int
    stages: int
    warps: int
    splits: int = 1


class Work(NamedTuple):
    """What the host knows of a launch.

    Attributes:
        rows: query rows of all tiles.
        tiles: entries of the tile table, among them those that are empty.
        tile_rows: most rows of a tile.
        heads: query heads.
        keys: key rows of all samples.
    """

    rows: int
    tiles: int
    tile_rows: int
    heads: int
    keys: int

    @property
    def samples(self) -> int:
        """About the number of samples: a table has a tile for every `tile_rows` rows and one more for each sample."""
        return max(1, self.tiles - 1 - self.rows // self.tile_rows)

    def programs(self, rows: int) -> int:
        """About the number of programs that have something to do, if a program takes `rows` rows of a head."""
        return self.heads * self.samples * -(-self.rows // (self.samples * rows))


def choose_blocks(dtype: torch.dtype, head_dim: int, work: Work, processors: int) -> Blocks:
    """Launch configuration by shape, from H200 measurements of 16-bit heads of 128. Tracking scores change none of it.

    Args:
        dtype: of q, k, v.
        head_dim: size of a head.
        work: the launch.
        processors: multiprocessors of the device.

    Returns:
        The blocks. `rows` may be less than `tile_rows`; a tile is then shared by several programs.
    """
    rows = min(_rows(work, processors), _power_of_two(min(work.rows, work.tile_rows)))
    one_wave = work.programs(rows) <= processors
    blocks = _blocks_of(dtype, head_dim, rows, one_wave)
    if dtype.itemsize == 2 and head_dim in (64, 128):
        blocks = _measured(blocks, one_wave, work.programs(rows) > 4 * processors)
    splits = _splits(work, blocks, processors)
    return blocks if splits == 1 else _shared(blocks, splits)


def _rows(work: Work, processors: int) -> int:
    """128 rows read keys half as often as 64, but take two programs' time: not where 64 rows are one wave."""
    each = work.rows / work.samples
    if each >= 96 and work.heads * -(-work.rows // 64) > processors:
        return 128
    return 64 if each > 32 else 32


def _measured(blocks: Blocks, one_wave: bool, many: bool) -> Blocks:
    """What differs from the rule where it was measured."""
    if blocks.rows == 32 and not one_wave:
        # Half of 64 rows is idle, but 64 rows run on wgmma; with still more programs less work counts for more.
        return Blocks(32, 128, 2, 4) if many else Blocks(64, 64, 3, 4)
    return blocks


def _splits(work: Work, blocks: Blocks, processors: int) -> int:
    """As many programs share a tile's keys as there are idle multiprocessors, while each has two blocks of keys."""
    idle = processors // work.programs(blocks.rows)
    if blocks.rows >= 64 and idle < 4:
        return 1  # two halves and their merge take longer than the whole
    most = max(1, min(8, idle, work.keys // work.samples // (2 * min(blocks.keys, 64))))
    return 1 << (most.bit_length() - 1)


def _shared(blocks: Blocks, splits: int) -> Blocks:
    """Smaller blocks, so that shares are even; the fourth stage makes up for them."""
    keys = min(blocks.keys, 64)
    stages = 4 if blocks.rows == 64 and keys == 64 else blocks.stages
    return blocks._replace(keys=keys, stages=stages, splits=splits)


def blocks_of(dtype: torch.dtype, head_dim: int, rows: int) -> Blocks:
    """Blocks of `rows` rows where there are several waves of programs."""
    return _blocks_of(dtype, head_dim, _power_of_two(rows), one_wave=False)


def _power_of_two(rows: int) -> int:
    return max(16, 1 << (rows - 1).bit_length())


def _blocks_of(dtype: torch.dtype, head_dim: int, rows: int, one_wave: bool) -> Blocks:
    if dtype == torch.float32:
        # True fp32 products run outside the tensor cores, on operands held in registers: larger blocks spill.
        return Blocks(min(rows, 32), 32, 2, 8) if head_dim <= 128 else Blocks(16, 16, 2, 8)
    if head_dim > 128:
        return Blocks(min(rows, 64), 32, 3, 4)
    if rows >= 128:
        return Blocks(128, 128, 3, 8)
    # One wave: the longest chain of blocks decides, so take the wide block that fills an SM's shared memory.
    # Several waves: half of it, so that two programs share an SM.
    return Blocks(rows, 128 if one_wave else 64, 3, 4)
