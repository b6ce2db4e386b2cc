"""Remove the direct path from heads to queries, keys, values or positions of heads of later layers.

    q, k, v, z of a receiver   <-   the same, computed from x - d
    x    the residual stream that enters the receiver's layer
    d    its part from the senders' outputs: r N(w) - r N(w'), w' attention's output without them

N is the norm of attention's output and r its factor, in families that have them. All other readers
of the residual stream, and other heads of the receiver's layer, see x, so paths through layers in
between stay. Queries, keys and values of x - d come from a second run of the layer, which stops
before it attends. Receivers of a layer with different senders need one run each. Every prompt of a
batch may have a different set of paths, so many sets share a pass. TransformerLens'
`get_act_patch_direct_path` needs separate inputs of heads, which repositioned attention does not
have, and does not support shared keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product, zip_longest
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from repo_interp.errors import InputError, quoted
from repo_interp.interventions.replacing import head_pairs, heads_by_layer, layer_and_head
from repo_interp.models.attention import CACHES, RepositionedAttention
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import called_at, intervention, model_edit
from repo_interp.models.recomputed import backward_pass
from repo_interp.plugins.paths.direct_path import added_outputs, inner

SITES = ("queries", "keys", "values", "positions")
"""Tensors of the receiver that a path may lead into."""
Head = tuple[int, int]
"""Layer and head."""
Pairs = Sequence[Head] | Head
Path = tuple[Head, Head] | tuple[Head, Head, str]
"""Sender, receiver, and the site that the path leads into."""
Route = tuple[Head, Head, tuple[str, ...]]
"""A checked path, with all its sites."""
Outputs = Mapping[int, Float[Tensor, "*any head d_head"]]
Run = Sequence[tuple[frozenset[Head], Mapping[str, frozenset[int]]]]
"""A second run of a layer: by prompt, the senders to leave out, and the receiving heads by site."""
Sent = tuple[RepositionedAttention, Tensor, Tensor, Tensor]
"""A layer, the outputs of its heads, and the input and output of its projection."""


class _Recorded(Exception):
    """Ends the second run of a layer."""


@model_edit
def ablate_paths(
    model: nn.Module,
    senders: Pairs = (),
    receivers: Pairs = (),
    into: str | Sequence[str] = SITES[:3],
    outputs: Outputs | None = None,
    *,
    sets: Sequence[Sequence[Path]] | None = None,
) -> Iterator[None]:
    """Remove, or patch, the direct path from heads into heads of later layers.

        with iv.ablate_paths(bridge, (0, 1), [(2, 0), (2, 1)], into="keys"):
            logits = bridge(tokens)
        with iv.ablate_paths(bridge, sets=[[((0, 1), (2, 0), "keys"), ((1, 3), (2, 1), "queries")]]):
            logits = bridge(tokens)  # two paths together

    Args:
        model: Repositioned model or bridge.
        senders: (layer, head) pairs whose outputs are removed.
        receivers: (layer, head) pairs of later layers, which no longer read these outputs.
        into: One or several of "queries", "keys", "values", and, if these are learned, "positions".
        outputs: By layer, outputs of heads that replace the senders' for the receivers:
            `ri.head_means(bridge, prompts)`, or, to patch, `hook_z` of another prompt
            [prompt, token, head, d_head]; None: zeros.
        sets: Instead of `senders` and `receivers`, sets of paths to remove together: one set for
            each prompt of the batch, possibly empty, or one for all. A path is (sender, receiver),
            for all sites in `into`, or (sender, receiver, site).

    Yields:
        None.

    Raises:
        InputError: The model lacks heads, a sender is not in an earlier layer than its receiver, a
            family does not add the outputs of heads to the residual stream, receivers share keys,
            values or positions with a head that is not named, a layer learns no positions, outputs
            have another shape, or the batch and `sets` differ in length; or, in backward(),
            gradient checkpointing computes layers again one by one.
    """
    decoder = as_decoder(model)
    if sets is None:
        sites = _sites(into)
        of_sets = [[(*pair, sites) for pair in product(head_pairs(senders), head_pairs(receivers))]]
    elif len(senders) or len(receivers):
        raise InputError("paths are sets, or lead from all senders to all receivers; give either")
    else:
        of_sets = [[checked_route(path, into) for path in paths] for paths in sets]
    edit = PathEdit(decoder, of_sets, added_outputs(decoder), outputs)
    with intervention(decoder) as undo:
        for attention in decoder.attentions(edit.sending):
            undo.enter_context(edit.sent_by(decoder, attention, edit.send))
        edit.lead(undo)
        yield


def _sites(into: Any) -> tuple[str, ...]:
    sites = (into,) if isinstance(into, str) else tuple(into)
    if not sites or any(site not in SITES for site in sites):
        raise InputError(f"paths lead into some of {', '.join(SITES)}; got {quoted(into)}")
    return sites


def checked_route(path: Any, into: Any) -> Route:
    """Check a path.

    Args:
        path: (sender, receiver), or (sender, receiver, site).
        into: One or several sites, for a path without a site.

    Returns:
        Sender, receiver and sites.

    Raises:
        InputError: `path` is not a path.
    """
    if not isinstance(path, tuple | list) or len(path) not in (2, 3):
        raise InputError(
            "a path is a sender and a receiver, or these and a site, such as ((0, 1), (2, 0), "
            f'"keys"); got {quoted(path)}'
        )
    sender, receiver, *site = path
    return layer_and_head(sender), layer_and_head(receiver), _sites(site[0] if site else into)


class PathEdit:
    """Sets of paths to remove, one set for each prompt of a batch or one for all."""

    def __init__(
        self,
        decoder: Decoder,
        sets: Sequence[Sequence[Route]],
        added: Mapping[int, tuple[nn.Module | None, float]],
        outputs: Outputs | None = None,
    ) -> None:
        """Check the paths; `added` is the result of `added_outputs` for the decoder.

        Raises:
            InputError: As `ablate_paths`.
        """
        self.decoder, self.added, self.outputs = decoder, added, outputs
        routes = [route for some in sets for route in some]
        senders, receivers = {route[0] for route in routes}, {route[1] for route in routes}
        for some in (senders, receivers):
            if some:
                heads_by_layer(decoder, sorted(some))  # refuses heads that the model lacks
        for sender, receiver, _ in routes:
            if sender[0] >= receiver[0]:
                raise InputError(
                    f"a path leads from a layer to a later one; got one from layer {sender[0]} to "
                    f"layer {receiver[0]}"
                )
        self.sending = {layer for layer, _ in senders}
        self.runs = _runs(sets)
        for layer in sorted(self.sending):
            if layer not in added:
                raise InputError(
                    f"outputs of the heads of layer {layer} are not added to the residual stream "
                    "one by one in this family, so no direct path begins there"
                )
            if outputs is not None and not isinstance(outputs.get(layer), Tensor):
                raise InputError(f"outputs lack layer {layer}, whose heads were to be patched")
        for attention in decoder.attentions(self.runs):
            for run, site in product(self.runs[attention.layer_idx], SITES):
                if site == "positions" and any(site in reads for _, reads in run):
                    if not attention.learned:
                        raise InputError(
                            f"layer {attention.layer_idx} ({attention.scheme}) learns no positions, "
                            "so no path leads into them"
                        )
                elif site != "positions":
                    # Called only to refuse bad heads before any pass; `_put` makes the mask again.
                    queries = site == "queries"
                    _mask(attention, run, site, attention.heads if queries else attention.kv_heads)
        self._parts: dict[tuple[int, Any], tuple[int | None, Tensor]] = {}
        self._recorded: dict[tuple[int, str, int], Tensor] = {}
        self._running: dict[int, int] = {}

    @staticmethod
    @contextmanager
    def sent_by(
        decoder: Decoder, attention: RepositionedAttention, receive: Callable[[Sent], object]
    ) -> Iterator[None]:
        """Call `receive` with the outputs of a layer in every pass, inside a `with` block.

        Args:
            decoder: Decoder of the model.
            attention: A layer whose outputs are added to the residual stream.
            receive: Called once per pass.

        Yields:
            None.
        """
        attended: list[Tensor] = []

        def keep(layer: RepositionedAttention, tensor: Tensor) -> None:
            attended.append(tensor)

        def hand_on(projection: nn.Module, arguments: tuple, wrote: Tensor) -> None:
            receive((attention, attended.pop(), arguments[0], wrote))

        projection = attention.output_projection
        assert projection is not None  # `added_outputs` has seen it
        with called_at(decoder, "attended", keep, [attention.layer_idx]):
            handle = projection.register_forward_hook(hand_on)
            try:
                yield
            finally:
                handle.remove()

    def send(self, sent: Sent) -> None:
        """Compute the parts of the residual stream that paths from a layer carry.

        Args:
            sent: Outputs of the layer in this pass.

        Raises:
            InputError: Outputs have another shape, or the number of sets differs from the batch.
        """
        attention, plain, given, wrote = sent
        layer, projection = attention.layer_idx, inner(attention.output_projection)
        whole = given.reshape(plain.shape)  # [prompt, token, head, d_head]
        value: Tensor | float = 0.0
        if self.outputs is not None:
            # Some families gate outputs before their projection (Qwen3-Next). The gate is the
            # quotient of both, and applies to the replacements too.
            gate = torch.where(plain == 0, 1.0, whole / plain)
            value = gate * _outputs(self.outputs[layer], plain, layer)
        norm, factor = self.added[layer]

        def written(projected: Tensor) -> Tensor:
            # `inner(...).forward`, so that this call does not come to a hook again
            return projected if norm is None else inner(norm).forward(projected)

        for heads in {
            key for run in self._all_runs() for key in [_heads_of(run, layer)] if any(key)
        }:
            if len(heads) not in (1, len(plain)):
                raise InputError(
                    f"paths of {len(heads)} prompts were named, but {len(plain)} prompts came; "
                    "give a set for each, or one for all"
                )
            left_out = [[head in some for head in range(attention.heads)] for some in heads]
            mask = torch.tensor(left_out, device=plain.device)[:, None, :, None]
            without = torch.where(mask, value, whole).to(whole)
            both = written(wrote), written(projection.forward(without.reshape(given.shape)))
            self._parts[layer, heads] = backward_pass(), factor * (both[0] - both[1])

    def lead(self, undo: ExitStack) -> None:
        """Hook the receivers until a stack of callbacks unwinds.

        Args:
            undo: Takes the callbacks that remove the hooks.
        """
        blocks = self.decoder.blocks
        for attention in self.decoder.attentions(self.runs):
            # A hook on the block, not on the module: the block reads the residual stream, before
            # its norm.
            block = next(part for part in blocks if attention.module in [*part.modules()])
            hook: Any = partial(self._enter, attention)
            undo.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for site in SITES:
            # Queries are always hooked, since their hook ends the second run.
            layers = [
                layer
                for layer, runs in self.runs.items()
                if site == "queries" or any(site in reads for run in runs for _, reads in run)
            ]
            put = partial(self._put, site)
            undo.enter_context(called_at(self.decoder, site, put, layers))

    def _all_runs(self) -> Iterator[Run]:
        return (run for runs in self.runs.values() for run in runs)

    def _enter(
        self, attention: RepositionedAttention, block: nn.Module, arguments: tuple, keywords: dict
    ) -> None:
        layer = attention.layer_idx
        # The second run of the block, below, calls this hook again.
        if layer in self._running:
            return
        given = {} if arguments else {"hidden_states": keywords["hidden_states"]}
        hidden = arguments[0] if arguments else given["hidden_states"]
        for number, run in enumerate(self.runs[layer]):
            changed = hidden
            for sender in sorted(self.sending):
                if any(heads := _heads_of(run, sender)):
                    # All senders are in earlier layers, which this pass has run
                    computed, part = self._parts[sender, heads]
                    if computed != backward_pass():
                        raise _computed_alone(layer)
                    changed = changed - part.reshape(hidden.shape)
            # A cache would get the new keys twice.
            further = keywords | {name: None for name in CACHES if name in keywords}
            further |= {"hidden_states": changed} if given else {}
            self._running[layer] = number
            try:
                block(*((changed, *arguments[1:]) if arguments else ()), **further)
            except _Recorded:
                pass
            finally:
                del self._running[layer]

    def _put(self, site: str, attention: RepositionedAttention, tensor: Tensor) -> Tensor | None:
        layer = attention.layer_idx
        if layer in self._running:
            self._recorded[layer, site, self._running[layer]] = tensor
            # A layer assigns positions, then makes keys and values, and queries after those
            if site == "queries":  # the last site that a layer computes
                raise _Recorded
            return None
        result = tensor
        for number, run in enumerate(self.runs[layer]):
            # Gradient checkpointing of transformers runs the block without its hooks.
            if (layer, site, number) not in self._recorded:
                raise _computed_alone(layer)
            new = self._recorded.pop((layer, site, number))
            if any(site in reads for _, reads in run):
                mask = _mask(attention, run, site, tensor.shape[1]).to(tensor.device)
                mask = mask.view(*mask.shape, *(1,) * (tensor.ndim - 2))
                result = torch.where(mask, new, result)
        return result


def _runs(sets: Sequence[Sequence[Route]]) -> dict[int, list[Run]]:
    """By receiving layer, its second runs; heads of a prompt with the same senders share one."""
    by_layer: dict[int, list[list[tuple[frozenset[Head], dict[str, frozenset[int]]]]]] = {}
    for number, routes in enumerate(sets):
        read: dict[tuple[int, int, str], set[Head]] = {}
        for sender, receiver, sites in routes:
            for site in sites:
                read.setdefault((*receiver, site), set()).add(sender)
        groups: dict[tuple[int, frozenset[Head]], dict[str, frozenset[int]]] = {}
        for (layer, head, site), senders in read.items():
            reads = groups.setdefault((layer, frozenset(senders)), {})
            reads[site] = reads.get(site, frozenset()) | {head}
        for (layer, senders), reads in groups.items():
            by_layer.setdefault(layer, [[] for _ in sets])[number].append((senders, reads))
    nothing = frozenset(), {}
    # A prompt with fewer groups than others is padded with runs that leave out nothing.
    return {layer: [*zip_longest(*rows, fillvalue=nothing)] for layer, rows in by_layer.items()}


def _heads_of(run: Run, layer: int) -> tuple[frozenset[int], ...]:
    """By prompt, the heads of a layer that a run leaves out."""
    return tuple(frozenset(head for at, head in senders if at == layer) for senders, _ in run)


def _computed_alone(layer: int) -> InputError:
    """Return the error for a layer that is recomputed without the layers of the senders."""
    return InputError(
        f"backward() computes layer {layer} again without the layers before it, in which removed "
        "paths begin (gradient checkpointing); call model.gradient_checkpointing_disable() before"
    )


def _mask(
    attention: RepositionedAttention, run: Run, site: str, count: int
) -> Bool[Tensor, "prompt row"]:
    """Mark the rows, of `count`, that the receivers of a run read; no other head may share them."""
    group = attention.heads // count
    table = torch.zeros(len(run), count, dtype=torch.bool)
    for number, (_, reads) in enumerate(run):
        chosen: Collection[int] = reads.get(site, ())
        rows = {head // group for head in chosen}
        if len(rows) * group != len(chosen):
            raise InputError(
                f"heads of layer {attention.layer_idx} share their keys, values or positions, {group} "
                "each, and some of them are not named; name all of them, or lead the path into "
                "queries"
            )
        table[number, sorted(rows)] = True
    return table


def _outputs(value: Tensor, plain: Tensor, layer: int) -> Tensor:
    """Return the given outputs of heads in the shape of the pass."""
    try:
        if value.ndim == 3:  # heads side by side
            value = value.reshape(*value.shape[:2], *plain.shape[2:])
        return value.to(plain).expand_as(plain)
    except RuntimeError:
        raise InputError(
            f"outputs of layer {layer} are {list(value.shape)}; wanted [head, d_head] or [prompt, "
            f"token, head, d_head] of {list(plain.shape)}"
        ) from None
