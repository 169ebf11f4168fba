#!/usr/bin/env python3
"""`ballast export`: what it writes of a checkpoint is read by Hugging Face's safetensors, with the bits of its step."""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

from ranks_for_tests import run_ranks  # noqa: F401  Which also lets ballast be found.
from messages import says

import safetensors
import safetensors.torch
import torch

import ballast.torch
from ballast import _files


def new_model():
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 50))
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.5)))
    return model


class ExportTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.saved = self.folder / "saved"

    def export(self, *words):
        """Without a service."""
        return subprocess.run([_files.program("ballast"), "export", *map(str, words)], capture_output=True, text=True,
                              timeout=120, check=False)

    def exported(self, *words):
        done = self.export(*words, "--json")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return json.loads(done.stdout)

    def fails(self, *words, code=1):
        done = self.export(*words)
        self.assertEqual((done.returncode, done.stdout), (code, ""))
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        says(self, done.stderr.rstrip())

    def train_and_save(self, steps=2):
        """The weights in fp32 by name, and the checkpoint."""
        service = ballast.Service(memory_limit="256MiB", threads=1, checkpoint_dir=self.saved)
        model = new_model()
        optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.02, service=service.address, job="gpt")
        for step in range(steps):
            numbers = torch.arange(20).reshape(4, 5) + step
            loss = (model[2](model[1](model[0](numbers))) * model.scale).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        saved = ballast.connect(service.address).save("gpt")
        optimizer.close()
        service.stop()
        return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}, saved["directory"]

    def test_safetensors_reads_the_bits_of_the_step(self):
        weights, checkpoint = self.train_and_save()
        for dtype, theirs in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            out = self.folder / dtype
            told = self.exported(checkpoint, out, f"--dtype={dtype}")
            self.assertEqual((told["job"], told["step"], told["tensors"]), ("gpt", 2, len(weights)))
            self.assertEqual(os.listdir(out), ["model.safetensors"])
            with safetensors.safe_open(out / "model.safetensors", framework="pt") as file:
                self.assertEqual(file.metadata(), {"format": "pt"})
            read = safetensors.torch.load_file(out / "model.safetensors")
            self.assertEqual(read.keys(), weights.keys())
            for name, tensor in read.items():
                self.assertEqual((tensor.dtype, tensor.shape), (theirs, weights[name].shape))
                self.assertTrue(torch.equal(tensor, weights[name].to(theirs)), name)
            new_model().load_state_dict(read)
        self.assertIn("exported job gpt at step 2", self.export(checkpoint, self.folder / "again").stdout)

    def test_several_files_have_the_index_of_hugging_face(self):
        weights, _ = self.train_and_save()
        out = self.folder / "out"
        told = self.exported(self.saved / "gpt", out, "--dtype=fp32", "--file-gb=0.000004")  # Of the folder the newest.
        self.assertGreater(len(told["files"]), 2)
        index = json.loads((out / "model.safetensors.index.json").read_text())
        self.assertEqual(index["metadata"]["total_size"], sum(4 * tensor.numel() for tensor in weights.values()))
        self.assertEqual(index["weight_map"].keys(), weights.keys())
        self.assertEqual(set(os.listdir(out)), {"model.safetensors.index.json", *index["weight_map"].values()})
        for file in set(index["weight_map"].values()):
            for name, tensor in safetensors.torch.load_file(out / file).items():
                self.assertEqual(index["weight_map"][name], file)
                self.assertTrue(torch.equal(tensor, weights[name]), name)

    def test_what_cannot_be_exported_gets_one_line_and_leaves_nothing(self):
        _, checkpoint = self.train_and_save()
        out = self.folder / "out"
        self.exported(checkpoint, out)
        self.fails(checkpoint, out)
        self.assertEqual(os.listdir(out), ["model.safetensors"])
        new = self.folder / "new"
        self.fails(checkpoint, new, "--dtype=int8", code=2)
        self.fails(checkpoint, new, "--file-gb=0", code=2)
        self.fails(self.folder / "none", new)
        master = pathlib.Path(checkpoint, "master.safetensors")
        damaged = bytearray(master.read_bytes())
        damaged[-1] ^= 1
        master.write_bytes(damaged)
        self.fails(checkpoint, new)
        self.assertEqual({path.name for path in self.folder.iterdir()}, {"saved", "out"})


if __name__ == "__main__":
    unittest.main()
