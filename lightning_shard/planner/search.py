"""Search: every layout once, then the dials of the promising ones turned as far as memory allows.

Tensor-parallel ranks see the same data, so such a plan's steps see fewer sequences than the others': its dials are
turned only where nothing else fits.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_shard.hardware import Cluster
from lightning_shard.planner.considered import Considered, weigh
from lightning_shard.planner.grid import base_plan, find_layouts, layouts, why_not_resident
from lightning_shard.plans import Plan
from lightning_shard.specs import ModelSpec, TrainSpec

REFINED = 6
"""Layouts whose dials are turned: the fastest of those that fit, and as many of the leanest that do not."""


class Search:
    """The plans considered for one model, training and cluster.

    The pins' ``tp`` and layout are checked when plans are made.

    Args:
        model: with its adapter injected.
        limit_bytes: what a plan may need of a device.
        pin: fields that are not to be chosen.

    Raises:
        ValueError: for a pin that names no field, cannot be weighed, or leaves no layout.
    """

    def __init__(
        self, model: ModelSpec, train: TrainSpec, cluster: Cluster, limit_bytes: int, pin: Mapping[str, Any]
    ) -> None:
        self._model, self._train, self._cluster = model, train, cluster
        self._limit, self._pin = limit_bytes, pin
        self._seen: dict[Plan, Considered] = {}

    def run(self) -> list[Considered]:
        """Every plan that was weighed."""
        bases = [self._try(base_plan(layout, self._model, self._pin)) for layout in self._layouts()]
        self._refine([one for one in bases if one.plan.tp == 1])
        if not any(self._fits(one) for one in self._seen.values() if one.plan.tp == 1):
            for tp in sorted(
                {one.plan.tp for one in bases} - {1}
            ):  # each size: the leanest of all are those of the largest
                self._refine([one for one in bases if one.plan.tp == tp])
        return list(self._seen.values())

    def _layouts(self) -> Iterator[tuple[int, int, int]]:
        return layouts(self._model, self._cluster, self._pin)

    def _refine(self, bases: list[Considered]) -> None:
        fitting = sorted((one for one in bases if self._fits(one)), key=lambda one: one.estimate.step_s)
        others = sorted((one for one in bases if not self._fits(one)), key=lambda one: one.needs_bytes)
        for one in [*fitting[:REFINED], *others[:REFINED]]:
            for settled in self._make_fit(one.plan):
                self._fill(settled.plan)

    def has_layouts(self) -> bool:
        """Whether any layout honours the pins."""
        return next(find_layouts(self._model, self._cluster, self._pin), None) is not None

    def leanest(self) -> Considered:
        """The plan that needs least, without a search: everything sharded and recomputed. Layers are split only
        where that does not fit.
        """
        most: dict[int, tuple[int, int, int]] = {}
        for layout in self._layouts():
            most[layout[2]] = max(layout, most.get(layout[2], layout), key=lambda sizes: sizes[1])
        tried = []
        for layout in most.values():
            plan = base_plan(layout, self._model, self._pin)
            plans = [plan]
            if self._free("activation_checkpoint"):
                plans = [dataclasses.replace(plan, activation_checkpoint="full"), plan]
            if self._free("adapters") and plan.adapters != "sharded":
                plans = [*(dataclasses.replace(one, adapters="sharded") for one in plans), *plans]
            tried.append(min(map(self._try, plans), key=lambda one: one.needs_bytes))
            if self._fits(tried[-1]):
                break
        return min(tried, key=lambda one: one.needs_bytes)

    def _make_fit(self, plan: Plan) -> Iterator[Considered]:
        """The plan, or what makes it fit: adapters sharded with their blocks, just enough recomputing blocks."""
        if self._fits(one := self._try(plan)):
            yield one
            return
        if self._free("adapters") and plan.adapters == "replicated":
            plan = dataclasses.replace(plan, adapters="sharded")
            if self._fits(one := self._try(plan)):
                yield one
                return
        if not self._free("activation_checkpoint") or not self._model.num_blocks:
            return

        def recomputing(count: int) -> Plan:
            return dataclasses.replace(plan, activation_checkpoint="full", activation_checkpoint_blocks=count)

        count = self._bisect(recomputing, self._model.num_blocks, fewest=True)
        if count is not None:
            everything = count == self._model.num_blocks
            yield self._try(
                dataclasses.replace(recomputing(count), activation_checkpoint_blocks=None if everything else count)
            )

    def _fill(self, plan: Plan) -> None:
        """Spend the memory that is left on less traffic: kept and resident blocks, deferred reductions."""
        if plan.dp_shard == 1:
            return
        if self._free("reshard_after_forward"):
            self._try(dataclasses.replace(plan, reshard_after_forward=False))
        most = self._model.num_blocks - 1  # with all of them nothing would be sharded
        if self._free("resident_blocks") and most > 0 and why_not_resident(self._model, self._train) is None:
            count = self._bisect(lambda count: dataclasses.replace(plan, resident_blocks=count), most, fewest=False)
            plan = dataclasses.replace(plan, resident_blocks=count or 0)
            self._try(plan)
        if self._train.accumulate > 1 and self._free("defer_gradient_sync"):
            self._try(dataclasses.replace(plan, defer_gradient_sync=True))

    def _bisect(self, make: Callable[[int], Plan], most: int, *, fewest: bool) -> int | None:
        """The fewest (or the most) blocks, 1 to ``most``, with which a plan fits; None where none does."""
        if fewest and not self._fits(self._try(make(most))):
            return None
        if not fewest and self._fits(self._try(make(most))):
            return most
        low, high = 0, most  # fewest: low does not fit and high does; most: the other way round
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(self._try(make(middle))) == fewest:
                high = middle
            else:
                low = middle
        return high if fewest else low or None

    def _fits(self, one: Considered) -> bool:
        return one.needs_bytes <= self._limit

    def _free(self, name: str) -> bool:
        return name not in self._pin

    def _try(self, plan: Plan) -> Considered:
        if plan not in self._seen:
            self._seen[plan] = weigh(self._model, self._train, plan, self._cluster)
        return self._seen[plan]
