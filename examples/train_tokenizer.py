"""A byte-level BPE tokenizer of your own text files: python examples/train_tokenizer.py FOLDER OUT [VOCAB_SIZE]"""

import sys
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"

folder, out = sys.argv[1:3]
vocab_size = int(sys.argv[3]) if len(sys.argv) > 3 else 4096
bpe = ByteLevelBPETokenizer()
bpe.train(sorted(map(str, Path(folder).glob("*.txt"))), vocab_size=vocab_size, special_tokens=[END])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END, pad_token=END)
tokenizer.save_pretrained(out)
print(f"{out}: {len(tokenizer)} tokens")
