"""The kinds of device work that a model is made of, each with its operations and the bytes it moves at least.

A kernel is described by its shape, because how fast a device runs it depends on the shape. Multiply-add is
two operations. Bytes count every operand read once and every result written once.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Product:
    """``count`` equal matrix products (m, k) @ (k, n) -> (m, n); ``itemsize``: bytes of an element.

    ``learned``: the second operand is a weight; if not, both operands' gradients are input gradients.
    """

    m: int
    n: int
    k: int
    count: int = 1
    itemsize: float = 2
    learned: bool = True

    @property
    def flops(self) -> float:
        """Operations."""
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def bytes(self) -> float:
        """Bytes read and written."""
        return float(self.itemsize * self.count * (self.m * self.k + self.k * self.n + self.m * self.n))

    @property
    def input_gradient(self) -> "Product":
        """dX (m, k) = dY (m, n) @ W (n, k)."""
        return replace(self, n=self.k, k=self.n)

    @property
    def weight_gradient(self) -> "Product":
        """dW (n, k) = dY^T (n, m) @ X (m, k)."""
        return replace(self, m=self.n, n=self.k, k=self.m)


@dataclass(frozen=True)
class Grouped:
    """One product an expert, on the rows that chose it: ``rows`` of all, ``experts`` weights (n, k) here."""

    rows: int
    n: int
    k: int
    experts: int
    itemsize: float = 2

    @property
    def flops(self) -> float:
        """Operations."""
        return 2.0 * self.rows * self.n * self.k

    @property
    def bytes(self) -> float:
        """Bytes read and written; the weights of experts that nobody chose stay where they are."""
        weights = self.reached * self.n * self.k
        return float(self.itemsize * (self.rows * (self.n + self.k) + weights))

    @property
    def reached(self) -> float:
        """Experts that some row chose, where every choice is as likely: E (1 - (1 - 1/E)^R)."""
        return self.experts * (1.0 - (1.0 - 1.0 / self.experts) ** self.rows)

    @property
    def input_gradient(self) -> "Grouped":
        """dX of every expert's rows."""
        return replace(self, n=self.k, k=self.n)

    @property
    def weight_gradient(self) -> "Grouped":
        """dW of every expert: as many operations, over the rows."""
        return self


@dataclass(frozen=True)
class Attention:
    """The core between projections, fused: scores never reach memory.

    Attributes:
        sequences: how many.
        queries: of each sequence.
        keys: that each sequence has, the queries' own included.
        heads: query heads here.
        kv_heads: key/value heads here.
        head_dim: width of a head.
        window: keys that a query sees at most; None: all earlier ones.
        backward: the backward pass.
        itemsize: bytes of an element.
        values_are_keys: values are the keys' leading elements, read with them (latent attention, compressed).
    """

    sequences: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    backward: bool = False
    itemsize: float = 2
    values_are_keys: bool = False

    @property
    def pairs(self) -> float:
        """Queries with a key that they see, of one sequence: causal, the last query sees every key."""
        first = self.keys - self.queries
        if self.window is None or self.window >= self.keys:
            return self.queries * first + self.queries * (self.queries + 1) / 2
        full = max(0, self.keys - max(self.window, first))  # queries whose window is full
        rising = self.queries - full
        return full * self.window + rising * first + rising * (rising + 1) / 2

    @property
    def flops(self) -> float:
        """2 products forward, 5 backward, scores computed again (Dao et al., arXiv 2205.14135)."""
        products = 5 if self.backward else 2
        return 2.0 * products * self.sequences * self.pairs * self.heads * self.head_dim

    @property
    def bytes(self) -> float:
        """Bytes of Q, K, V and the result; backward of these, their gradients and the result's."""
        keys = self.keys * self.kv_heads / (2 if self.values_are_keys else 1)
        elements = self.queries * self.heads + keys
        passes = 4 if self.backward else 2
        return float(passes * self.itemsize * self.sequences * elements * self.head_dim)


@dataclass(frozen=True)
class Scan:
    """Mamba-2's scan in chunks. Source of the operations: Dao and Gu, arXiv 2405.21060, section 6.

    Attributes:
        tokens: T.
        heads: here.
        head_dim: P.
        state: N.
        groups: of B and C here.
        chunk: Q.
        backward: the backward pass, scores computed again.
        itemsize: bytes of an element.
    """

    tokens: int
    heads: int
    head_dim: int
    state: int
    groups: int
    chunk: int
    backward: bool = False
    itemsize: float = 2

    @property
    def flops(self) -> float:
        """Operations of its products; per token 2QNG (C B^T) + 2QHP (scores X) + 4NHP (states in and out).

        The backward computes scores again, has two products for each of the forward's, and reads the entered
        state once more for its decay.
        """
        inner = self.heads * self.head_dim
        scores = 2.0 * self.chunk * self.state * self.groups
        mixed, states = 2.0 * self.chunk * inner, 4.0 * self.state * inner
        if not self.backward:
            return self.tokens * (scores + mixed + states)
        return self.tokens * (3 * scores + 2 * mixed + 2.5 * states)

    @property
    def bytes(self) -> float:
        """Bytes of x, y, B, C and one state a chunk; backward of these and their gradients."""
        inner = self.heads * self.head_dim
        elements = self.tokens * (2 * inner + 2 * self.groups * self.state + 2 * self.heads)
        states = 4 * self.tokens / self.chunk * inner * self.state
        return float((2 if self.backward else 1) * (self.itemsize * elements + states))


@dataclass(frozen=True)
class Elementwise:
    """Work bound by memory: norms, activations, additions, lookups, the optimizer. ``what`` names it."""

    what: str
    bytes: float
    flops: float = 0.0


Kernel = Product | Grouped | Attention | Scan | Elementwise
"""Any of them."""
