"""How DTensor lays out lists of tensors, worked out once for those that are alike."""

from typing import Any

__all__ = ["quick_list_layouts"]


def quick_list_layouts() -> tuple[tuple[Any, str, Any], ...]:
    """Owner, attribute and a quicker function for two places where DTensor works out an operator on lists of tensors.

    It does so for every tensor of the list anew, and each time looks through the whole list, so that an optimizer's
    first step takes time that grows as the square of their number: most of a simulation of adapters, whose few shapes
    are the same in every block. Empty where torch does it another way (before 2.13). Can go when DTensor remembers.
    """
    from torch.distributed.tensor import _sharding_prop as sharding

    names = "_expand_single_dim_strategy_to_mesh", "_propagate_use_strided_shard_flag"
    if not all(hasattr(sharding, name) for name in names):
        return ()
    expand, mark = (getattr(sharding, name) for name in names)
    return (sharding, names[0], _each_kind_once(expand)), (sharding, names[1], _only_where_strided(mark))


def _each_kind_once(expand: Any) -> Any:
    """``expand``, given one tensor of each layout and shape in the lists of an operator."""
    from torch.distributed.tensor._op_schema import OpSchema, TupleStrategy

    def quick(mesh: Any, schema: Any, info: Any, results: Any) -> Any:
        lists: list[Any] = [arg for arg in schema.args_schema if isinstance(arg, TupleStrategy)]
        if not lists or any(len(each.children) != len(lists[0].children) for each in lists):
            return expand(mesh, schema, info, results)
        kinds: dict[Any, int] = {}
        kind_of: list[int] = []
        firsts: list[int] = []
        for place in range(len(lists[0].children)):
            specs = tuple(each.children[place].strategies[0].output_spec for each in lists)
            kind = kinds.setdefault((specs, results[place] if results is not None else None), len(kinds))
            if kind == len(firsts):
                firsts.append(place)
            kind_of.append(kind)

        def some(arg: Any) -> Any:
            return TupleStrategy([arg.children[place] for place in firsts]) if isinstance(arg, TupleStrategy) else arg

        few = OpSchema(schema.op, tuple(map(some, schema.args_schema)), schema.kwargs_schema, schema.schema_info)
        work_out = expand(mesh, few, info, None if results is None else [results[place] for place in firsts])

        def for_all(*args: Any) -> Any:
            found = work_out(*args).children
            return TupleStrategy([found[kind] for kind in kind_of])

        return for_all

    return quick


def _only_where_strided(mark: Any) -> Any:
    """``mark``, called where it has something to do; that is asked once for an operator, not for each of its tensors."""
    from torch.distributed.tensor.placement_types import _StridedShard

    asked: list[tuple[Any, bool]] = [(None, False)]

    def quick(strategy: Any, schema: Any) -> None:
        if asked[0][0] is not schema:
            strided = any(isinstance(place, _StridedShard) for spec in schema.args_spec for place in spec.placements)
            asked[0] = schema, strided
        if asked[0][1]:
            mark(strategy, schema)

    return quick
