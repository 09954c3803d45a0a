"""Pages of prompts that have been computed, for sessions that begin with the same inputs.

A page holds the keys, values and outputs of `PAGE_TOKENS` positions. Its name is a hash of all inputs up to its end, so
two sessions share a page only if they began with the same inputs, bit for bit: inputs come from strangers, who must not
be able to make two prompts look alike. `PrefixCache` finds pages by hash, and drops the least recently used ones when
its budget is full.

The inputs of each page are hashed by GMAC (NIST SP 800-38D) with a secret key of this process, and these tags by
BLAKE2b. GMAC reads 20 GB/s where BLAKE2b reads 1. It is safe here because key and tags stay secret: to somebody who
doesn't know the key, any two different pages have the same tag with a probability of less than 2^-100.

`SharedPrefix` is one session's way along its prompt. The hashed inputs and the content of the cache must agree: a
session whose cache has seen anything else shares no more, until it begins anew. Pages are copied into the session's
own buffers, as attention wants keys and values in one piece; if all sessions of a span are on pages of one pool
(`span/page_pool`), pages are shared by reference. Used by `step_runner`; `SharedPrefix.reuse` and `keep` run in the
device thread.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs, arithmetic
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.page_pool import SharedPage
from swarmllm.models.span.span_cache import SpanCache

PAGE_TOKENS = 64
"""Number of positions of a page. Assumed: most system prompts fill some pages, and the bookkeeping of a page costs next
to nothing."""

MIN_STEP_TOKENS = 17
"""Fewest tokens of a step of a prompt; shorter steps are generated tokens. Session steps of up to 16 count as
decoding."""

_KEY = secrets.token_bytes(16)
_NONCE = bytes(12)
"""Always the same: GMAC needs a new nonce for each tag only if others see the tags."""


class PrefixHash:
    """The hash of all values of one kind so far. How they are cut into pieces makes no difference."""

    def __init__(self) -> None:
        self._pages = hashlib.blake2b()
        self._page = self._new_page()

    def update(self, values: Tensor) -> None:
        """Add values, which are in host memory."""
        # With a last axis of 1, which has stride 1 in every layout, torch can view it as bytes.
        in_bytes = values.contiguous().unsqueeze(-1).view(torch.uint8).flatten()
        self._page.authenticate_additional_data(memoryview(in_bytes.numpy()))  # type: ignore[arg-type]  # numpy stubs lack __buffer__

    def end_page(self) -> bytes:
        """The hash of all pages, of which one is complete now."""
        self._page.finalize()
        self._pages.update(self._page.tag)
        self._page = self._new_page()
        return self._pages.digest()

    def _new_page(self) -> AEADEncryptionContext:
        return Cipher(AES(_KEY), GCM(_NONCE)).encryptor()


@dataclass(frozen=True, eq=False, slots=True)
class Page:
    """Results of `PAGE_TOKENS` positions, which nothing writes into."""

    keys_values: SharedPage | tuple[tuple[Tensor, Tensor] | None, ...]
    """Keys and values of each block, `[1, heads, page, head]`; None for a block that uses those of another block. Or a
    page of the pool in which sessions have their caches."""
    outputs: Tensor
    """`[…, 1, page, …]`."""

    @property
    def num_bytes(self) -> int:
        if isinstance(self.keys_values, SharedPage):
            return self.outputs.nbytes + self.keys_values.num_bytes
        pairs = [pair for pair in self.keys_values if pair is not None]
        return self.outputs.nbytes + sum(tensor.nbytes for pair in pairs for tensor in pair)


class PrefixCache:
    """Pages by hash, within a byte budget."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self.num_reused_tokens = 0
        """Number of positions so far that didn't have to be computed."""
        self._pages: OrderedDict[bytes, Page] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def find(self, digests: Sequence[bytes]) -> list[Page]:
        """Return the pages of a prefix, up to the first that is missing."""
        found: list[Page] = []
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            found.append(page)
        self._used(digests[: len(found)])
        return found

    def keep(self, pages: Sequence[tuple[bytes, Page]]) -> None:
        """Keep pages of one prefix, in order; drop others if there is too little room. A page larger than the budget
        isn't kept."""
        for digest, page in pages:
            if digest not in self._pages and page.num_bytes <= self.capacity_bytes:
                self._pages[digest] = page
                self.num_bytes += page.num_bytes
        self._used([digest for digest, _ in pages])
        while self.num_bytes > self.capacity_bytes:
            _, page = self._pages.popitem(last=False)
            self.num_bytes -= page.num_bytes

    def clear(self) -> None:
        """Drop all pages."""
        self._pages.clear()
        self.num_bytes = 0

    def _used(self, digests: Sequence[bytes]) -> None:
        """Note the use of pages, the last one first: a page is useless without the pages before it."""
        for digest in reversed(digests):
            if digest in self._pages:
                self._pages.move_to_end(digest)


class SharedPrefix:
    """Finds and keeps pages for one session, from its first position until a step that doesn't belong to a prompt."""

    def __init__(self, pages: PrefixCache, blocks: BlockSpan, span: Span) -> None:
        self._pages, self._blocks, self._span = pages, blocks, span
        self._axis = blocks.traits.batch_axis + 1
        self._length = 0
        """Number of positions that are hashed, cached and kept; -1 while a step is under way, and for good if it
        fails."""
        self._end = 0
        """Number of hashed positions, with those of the step under way."""
        self._hashes: dict[str, PrefixHash] = {}
        """The hash of all positions so far, by kind of input."""
        self._new: list[tuple[int, bytes]] = []
        """(end, digest) of the pages that the current step completes."""
        self._arithmetic = 0
        """The way in which the blocks compute these positions: frequencies may depend on a prompt's length."""
        self._adapter = ""
        """Name of the server's adapter that the pages are computed with; a client's own adapter has no pages."""
        self._tail: Tensor | None = None
        """Outputs of the page that isn't complete yet."""
        self.shares = False
        """True if the results of the session's last step may be shared; set by its runner."""

    def fits(self, position: int, inputs: BlockInputs, cache: SpanCache) -> bool:
        """True if the step at `position` continues the prompt and has no unusual inputs.

        Call it for each step that may change the cache, before the step does.
        """
        length, self._length = self._length, -1  # no later step continues this one, unless `keep` is called
        mask, end = inputs.attention_mask, position + inputs.seq_len
        return (
            (position == 0 or position == length == cache.position)
            and inputs.batch_size == 1
            and inputs.seq_len >= MIN_STEP_TOKENS
            and (inputs.adapter is None or bool(inputs.adapter.name))
            and inputs.token_type_ids is None
            and inputs.dropout_seeds is None
            and (position == 0 or self._arithmetic == arithmetic(inputs, position, self._blocks.traits))
            and cache.is_pageable
            # Exactly 1: some models count positions by adding up the mask, and a 2 would count twice.
            and (mask is None or (mask.shape == (1, end) and bool((mask == 1).all())))
            and (position == 0 or self._hashes.keys() == self._columns(inputs).keys())
        )

    def read(self, position: int, inputs: BlockInputs) -> bool:
        """Hash the inputs of the step at `position`, which `fits`. True if its first page may be known: then `reuse` it
        before the blocks run.

        A call that was cancelled may go on in its thread, so the object must not be used any more.
        """
        if position == 0:
            self._hashes, self._tail = {}, None
            self._arithmetic = arithmetic(inputs, position, self._blocks.traits)
            self._adapter = "" if inputs.adapter is None else inputs.adapter.name
        columns = self._columns(inputs)
        end, start = position + inputs.seq_len, position
        self._new = []
        while position < end:
            page_end = min(end, (position // PAGE_TOKENS + 1) * PAGE_TOKENS)
            for kind, tensor in columns.items():
                self._hashes.setdefault(kind, PrefixHash()).update(tensor[position - start : page_end - start])
            position = page_end
            if position % PAGE_TOKENS == 0:
                self._new.append((position, self._digest()))
        self._end = end
        return bool(self._new) and self._new[0][1] in self._pages

    def reuse(self, cache: SpanCache) -> Tensor | None:
        """Copy known pages of the step that was read into the cache; return the outputs of their positions."""
        found = self._pages.find([digest for _, digest in self._new])
        outputs: list[Tensor] = []
        for (end, _), page in zip(self._new, found, strict=False):
            skipped = cache.length - (end - PAGE_TOKENS)  # the last step ended within this page
            cache.append_page(page.keys_values, skipped)
            outputs.append(page.outputs.narrow(self._axis, skipped, PAGE_TOKENS - skipped))
        reused = torch.cat(outputs, dim=self._axis) if outputs else None
        self._pages.num_reused_tokens += 0 if reused is None else reused.shape[self._axis]
        return reused

    def keep(self, cache: SpanCache, outputs: Tensor) -> None:
        """Keep the new pages of a step that is in the cache now; `outputs` are its outputs."""
        known = outputs if self._tail is None else torch.cat([self._tail, outputs], dim=self._axis)
        first = self._end - known.shape[self._axis]
        pages: list[tuple[bytes, Page]] = []
        for end, digest in self._new:
            if digest not in self._pages:
                of_page = known.narrow(self._axis, end - PAGE_TOKENS - first, PAGE_TOKENS).clone()
                pages.append((digest, Page(cache.page(end - PAGE_TOKENS, end), of_page)))
        self._pages.keep(pages)
        rest = self._end % PAGE_TOKENS
        self._tail = known.narrow(self._axis, known.shape[self._axis] - rest, rest).clone() if rest else None
        self._length = self._end

    def _digest(self) -> bytes:
        """The name of the page that is complete now."""
        about = f"{self._span} {self._blocks.dtype} {self._adapter} {self._arithmetic}"
        digest = hashlib.blake2b(about.encode())
        for kind in sorted(self._hashes):
            digest.update(f" {kind} ".encode() + self._hashes[kind].end_page())
        return digest.digest()

    def _columns(self, inputs: BlockInputs) -> dict[str, Tensor]:
        """The inputs that blocks read, by kind, positions first: the cut of a prompt into steps makes no difference."""
        axes = {"hidden_states": self._axis, "position_ids": -1, "input_ids": 1, "inputs_embeds": 1}
        axes |= {"per_layer_inputs": 1, "deepstack": 1, "deepstack_mask": 1, "deepstack_at": 0}
        columns = {}
        for name, axis in axes.items():
            tensor: Tensor | None = getattr(inputs, name)
            if tensor is not None:
                column = tensor.movedim(axis, 0)
                columns[f"{name} {column.dtype} {tuple(column.shape[1:])}"] = column
        return columns
