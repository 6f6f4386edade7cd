import pytest
from tiny_models import tiny


@pytest.fixture(autouse=True)
def model(run):
    """A folder "llama" with the configuration of a model whose head is worth many layers."""
    config = tiny("llama", num_hidden_layers=6, vocab_size=4096, tie_word_embeddings=False)
    config.save_pretrained("llama")


def test_cuts_are_printed_side_by_side_and_the_one_to_train_with(run):
    code, out, err = run(
        "partition", "llama", "--stages", "2", "--micro-batches", "3", "--sequence-length", "16", "--gpu", "h100-sxm"
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    rows = {line[:12].strip(): line for line in lines if "GiB" in line}
    assert rows.keys() == {"uniform", "parameters", "fastest", "most frugal"}
    assert "[3, 3]" in rows["uniform"]
    assert "No cut is faster than the fastest one: proven." in lines
    assert any("simulated H100-SXM" in line for line in lines)
    assert any("SIMULATED" in line for line in lines)
    cut = lines[-1].removeprefix("Train with cut=").removesuffix(".")
    assert cut in rows["most frugal"]
    assert cut in ("[4, 2]", "[5, 1]")


def test_a_model_that_does_not_fit_says_what_to_do(run):
    code, _, err = run(
        "partition",
        "llama",
        "--stages",
        "3",
        "--micro-batches",
        "4",
        "--sequence-length",
        "16",
        "--memory-gib",
        "0.0001",
    )
    assert code == 2
    assert "GiB are allowed. Give more stages" in err
    code, _, err = run("partition", "llama", "--stages", "7", "--micro-batches", "4")
    assert code == 2
    assert "6 layers, so 1 to 6 stages, not 7" in err
