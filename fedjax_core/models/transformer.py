r"""A small transformer for the next token.

With the embedding :math:`E` (V x d), positions :math:`P` (T x d) and tokens
:math:`t_1, \dots, t_T`

.. math::

  x &= E_{t} + P \\
  x &\leftarrow x + \mathrm{attention}(\mathrm{norm}(x)), \quad
  x \leftarrow x + \mathrm{MLP}(\mathrm{norm}(x)) \qquad \text{in every block} \\
  z &= \mathrm{norm}(x) E^\top

where attention looks at no later position and the MLP has one hidden layer, 4 d wide,
with GELU. Normalising first is what makes such a network train with plain SGD.

References:
  Vaswani et al., "Attention Is All You Need", NeurIPS 2017.
  Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, Section
  2.3: normalisation before each part and after the last block, tables that start near
  0 and smaller weights at the start where a part joins the sum.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_core import check
from fedjax_core.models.adapters import language_model
from fedjax_core.models.layers import Dense
from fedjax_core.models.model import Ids, Model


class TransformerLM(nn.Module):
    """Embeddings of tokens and positions, blocks of attention and an MLP, logits."""

    num_ids: int  # tokens, and logits
    width: int = 128  # d
    depth: int = 2  # blocks
    heads: int = 4  # of attention, each width / heads wide
    tied: bool = True  # logits from the embedding, or from a layer of their own

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Maps [B, T] to logits [B, T, num_ids]."""
        batch, length = ids.shape
        table = self._table("embedding", self.num_ids)
        positions = self._table("positions", length)
        x = table[ids] + positions[None]
        for _ in range(self.depth):
            x = x + self._attention(nn.LayerNorm()(x))
            hidden = nn.gelu(self._dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + self._joining()(hidden)
        x = nn.LayerNorm()(x)
        if self.tied:
            return x @ table.T
        logits = Dense(self.num_ids)(x.reshape(batch * length, self.width))
        return logits.reshape(batch, length, self.num_ids)

    def _table(self, name: str, rows: int) -> jax.Array:
        init = nn.initializers.normal(0.02)
        return self.param(name, init, (rows, self.width), jnp.float32)

    def _dense(self, width: int) -> nn.Dense:
        return nn.Dense(width, kernel_init=nn.initializers.glorot_uniform())

    def _joining(self) -> nn.Dense:
        """A layer whose outputs are added to the sum, 2 * depth of them in all."""
        init = nn.initializers.variance_scaling(
            1 / (2 * self.depth), "fan_avg", "uniform"
        )
        return nn.Dense(self.width, kernel_init=init)

    def _attention(self, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:2], 3, self.heads, self.width // self.heads)
        q, k, v = jnp.moveaxis(self._dense(3 * self.width)(x).reshape(shape), 2, 0)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self._joining()(seen.reshape(x.shape))


def transformer_lm(
    num_ids: int = 90,
    length: int = 80,
    width: int = 128,
    depth: int = 2,
    heads: int = 4,
    *,
    tied: bool = True,
) -> Model:
    """A transformer for the next token: by default 418,560 parameters.

    With V = num_ids, T = length, d = width: V d embeddings, T d positions, 12 d^2 +
    13 d in every block, 2 d in the last normalisation; if not `tied` V (d + 1) more.

    Args:
      num_ids: ids are 0 to num_ids - 1: 90 for those of `datasets.characters`.
      length: ids of an example, `x` [B, length], int32; `y` [B, length] holds the id
        after each of `x`, 0 is padding, at the end, and not scored, see
        `language_model`.
      width: channels of every position.
      depth: blocks.
      heads: heads of attention; they divide width.
      tied: whether the logits are products with the embedding.

    Raises:
      ValueError, TypeError: heads doesn't divide width, or an argument is not an int
        >= 1.
    """
    check.positive_int(num_ids=num_ids, width=width, depth=depth, heads=heads)
    if width % heads:
        raise ValueError(f"heads must divide width, {width}, got {heads}.")
    model = language_model(TransformerLM(num_ids, width, depth, heads, tied), length)
    return model._replace(ids={"x": Ids(num_ids), **model.ids})
