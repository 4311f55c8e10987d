"""What draft and target tokenizers must share, and what a bundle keeps of them."""
