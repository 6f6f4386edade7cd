"""Creates a folder with a tiny Llama: configuration, random weights, and a tokenizer of numbers."""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = [*map(str, range(127)), "<s>", "<|endoftext|>", "<|padding|>"]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<|padding|>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    bos_token="<s>",
    eos_token="<|endoftext|>",
    unk_token="<|padding|>",
    pad_token="<|padding|>",
).save_pretrained(sys.argv[1])
torch.manual_seed(1)
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,  # with fewer, the last of two stages of qlora-pipe has none
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=127,
        eos_token_id=128,
    )
).save_pretrained(sys.argv[1])
