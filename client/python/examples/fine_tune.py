#!/usr/bin/env python3
"""Trains a causal language model on text with the Hugging Face Trainer, its optimizer on a Ballast service.

    python fine_tune.py --model gpt2        from the hub, or a folder
    python fine_tune.py                     a small new one, which reads bytes and needs no download
"""

import argparse
import pathlib
import pydoc_data.topics

import transformers

import ballast.torch
import curve


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name of the hub or a folder")
    parser.add_argument("--text", type=pathlib.Path, help="default: the help pages that come with Python")
    parser.add_argument("--service", help="host:port or unix:/path; default: one of its own")
    parser.add_argument("--job", default="fine-tune")
    parser.add_argument("--out", default="fine-tune-out")
    for name, default in (("steps", 100), ("micro-steps", 2), ("batch", 8), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--max-norm", type=float, default=1.0)
    return parser.parse_args()


def load(name, context):
    if name is not None:
        return (transformers.AutoModelForCausalLM.from_pretrained(name),
                transformers.AutoTokenizer.from_pretrained(name))
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=len(tokenizer), n_positions=context)
    return transformers.GPT2LMHeadModel(config), tokenizer


def rows_of(text, tokenizer, context):
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [{"input_ids": tokens[i:i + context], "labels": tokens[i:i + context]}
            for i in range(0, len(tokens) - context, context)]


def main():
    args = arguments()
    transformers.set_seed(1)
    model, tokenizer = load(args.model, args.context)
    text = args.text.read_text() if args.text else "\n".join(pydoc_data.topics.topics.values())
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=args.out, max_steps=args.steps, per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.micro_steps, max_grad_norm=0,  # The optimizer clips.
            lr_scheduler_type="cosine", warmup_steps=args.steps // 10, logging_steps=1, save_strategy="no",
            report_to=[]),
        train_dataset=rows_of(text, tokenizer, args.context),
        optimizer_cls_and_kwargs=(ballast.torch.AdamW, {
            "params": ballast.torch.groups(model, weight_decay=0.1), "lr": args.lr, "max_norm": args.max_norm,
            "service": args.service, "job": args.job}))
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(args.out)
        tokenizer.save_pretrained(args.out)
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        curve.write(args.out, losses, f"{model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
