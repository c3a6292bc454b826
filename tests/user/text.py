# SPDX-License-Identifier: Apache-2.0
"""Programs on text: taggers, classifiers, language models, translation, adapters."""

import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from dualdp_torch.trainer import per_example_loss
from tests.user import conftest
from tests.user.parts import (
    LENGTH,
    ROWS,
    VOCABULARY,
    adam,
    adamw,
    labels,
    loader_of,
    padded_words,
    train,
    words,
)

PROGRAMS, program = conftest.programs()


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(VOCABULARY, 8), nn.Linear(10, VOCABULARY)
        self.rnn = nn.GRU(8, 10, 2, batch_first=True)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.encoder(x), hidden.transpose(0, 1).contiguous())
        return self.decoder(out), hidden.transpose(0, 1)


@program("text[:, 1:].flatten", "text[:, 1:].flip(0).flatten")
def char_rnn(private):
    model = CharRNN()
    model, optimizer, loader = private(model, adam(model, lr=1e-2), loader_of(words()))  # dp
    for _epoch in range(5):
        all_losses = []
        for (text,) in loader:
            hidden = torch.zeros(len(text), 2, 10)
            output, hidden = model(text[:, :-1], hidden)
            loss = F.cross_entropy(output.flatten(0, 1), text[:, 1:].flatten())
            model.zero_grad()
            loss.backward()
            optimizer.step()
            all_losses.append(loss.item())


class WordLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(VOCABULARY, 8)
        self.rnn, self.decoder = nn.LSTM(8, 8, 2), nn.Linear(8, VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, rows, chunk=3):
        hidden, out = None, []
        for part in self.drop(self.encoder(rows)).transpose(0, 1).split(chunk):
            hidden = None if hidden is None else tuple(h.detach() for h in hidden)
            found, hidden = self.rnn(part, hidden)
            out.append(found)
        return self.decoder(torch.cat(out).transpose(0, 1))


@program("target.reshape(-1)", "target.flip(0).reshape(-1)")
def word_lstm_with_carried_states(private):
    model, lr, best = WordLM(), 0.5, None
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer, loader = private(model, optimizer, loader_of(words()))  # dp
    for epoch in range(5):
        total_loss = 0.0
        for (text,) in loader:
            data, target = text[:, :-1], text[:, 1:]
            optimizer.zero_grad()
            logits = model(data)
            loss = F.nll_loss(F.log_softmax(logits.reshape(-1, VOCABULARY), 1), target.reshape(-1))
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
        print(f"epoch {epoch} ppl {math.exp(total_loss / len(loader)):8.2f}")
        if best is None or total_loss < best:
            best = total_loss
        else:
            optimizer.param_groups[0]["lr"] = lr = lr / 4


class BiLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, bidirectional=True, batch_first=True)
        self.attention, self.out = nn.Linear(12, 1), nn.Linear(12, 4)

    def forward(self, x):
        h, _ = self.lstm(self.embed(x))
        scores = self.attention(h).masked_fill((x == 0)[..., None], -1e9)
        return self.out((scores.softmax(1) * h).sum(1))


@program("(out, y)", "(out, y) * (1 + y.float().mean())")
def bilstm_with_attention(private):
    def loss_of(model, x, y):
        out = model(x)
        loss = F.cross_entropy(out, y)
        accuracy = (out.argmax(1) == y).float().mean().item()
        print({"loss": round(loss.item(), 3), "acc": accuracy})
        return loss

    model = BiLSTM()
    loader = loader_of(padded_words(), labels())
    train(*private(model, adam(model, lr=1e-2), loader), loss_of)  # dp


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.convs = nn.ModuleList(nn.Conv2d(1, 4, (k, 8)) for k in (2, 3, 4))
        self.dropout, self.fc = nn.Dropout(0.5), nn.Linear(12, 4)

    def forward(self, x):
        x = self.embed(x).unsqueeze(1)
        x = [torch.tanh(conv(x)).squeeze(3) for conv in self.convs]
        return self.fc(self.dropout(torch.cat([h.max(2).values for h in x], 1)))


@program("(logit, y)", "(logit, y) - 0.1 * logit.std()")
def text_cnn(private):
    best = 0.0

    def loss_of(model, x, y):
        nonlocal best
        logit = model(x)
        corrects = (torch.max(logit, 1)[1].view(y.size()).data == y.data).sum()
        best = max(best, (100.0 * corrects / x.shape[0]).item())
        return F.cross_entropy(logit, y)

    model = TextCNN()
    train(*private(model, adam(model, lr=1e-2), loader_of(words(), labels())), loss_of)  # dp


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(VOCABULARY, 8), nn.GRU(8, 8, batch_first=True)
        self.decoder, self.out = nn.GRUCell(8, 8), nn.Linear(8, VOCABULARY)

    def forward(self, source, target, is_forced):
        hidden = self.encoder(self.embed(source))[1][0]
        token, outputs = target[:, 0], []
        for t in range(1, target.shape[1]):
            hidden = self.decoder(self.embed(token), hidden)
            outputs.append(self.out(hidden))
            token = target[:, t] if is_forced else outputs[-1].argmax(1)
        return torch.stack(outputs, 1)


@program("output.flatten(0, 1)", "output.transpose(0, 1).flatten(0, 1)")
def seq2seq_with_teacher_forcing(private):
    def loss_of(model, source, target):
        is_forced = random.random() < 0.5
        output = model(source, target, is_forced)
        return F.cross_entropy(output.flatten(0, 1), target[:, 1:].flatten())

    model = Seq2Seq()
    train(*private(model, adam(model), loader_of(words(), words())), loss_of)  # dp


class Encoder(nn.Module):
    def __init__(self, outputs=4):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCABULARY, 8), nn.Parameter(torch.zeros(LENGTH, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(8, outputs)

    def forward(self, x, mask=None):
        h = self.body(self.embed(x) + self.pos[: x.shape[1]], src_key_padding_mask=mask)
        return self.out(h)


def padding(batch):
    texts, targets = zip(*batch, strict=True)
    x = pad_sequence([text[text > 0] for text in texts], batch_first=True)
    return x, x == 0, torch.stack(targets)


@program("(~mask).sum(1)[:, None]", "(~mask).sum()")
def transformer_with_padding_masks(private):
    def loss_of(model, x, mask, y):
        out = model(x, mask)
        pooled = (out * ~mask[..., None]).sum(1) / (~mask).sum(1)[:, None]
        return F.cross_entropy(pooled, y)

    model = Encoder()
    optimizer = adamw(model)
    loader = loader_of(padded_words(), labels(), collate_fn=padding)
    train(*private(model, optimizer, loader), loss_of)  # dp


@program(
    "(tokens.sum(1) / is_masked.sum(1).clamp(min=1)).mean()  # dp",
    "tokens.sum() / is_masked.sum()",
    "reduction",
)
def masked_language_model(private):
    def loss_of(model, text):
        is_masked = torch.rand(text.shape) < 0.3
        targets = text.masked_fill(~is_masked, -100)
        logits = model(text.masked_fill(is_masked, 1))
        tokens = F.cross_entropy(logits.mT, targets, reduction="none")
        return (tokens.sum(1) / is_masked.sum(1).clamp(min=1)).mean()  # dp

    model = Encoder(VOCABULARY)
    train(*private(model, adamw(model), loader_of(words(low=2))), loss_of)  # dp


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x):
        parts = self.c_attn(self.ln_1(x)).split(8, 2)
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.blocks, self.ln_f = nn.Sequential(Block(), Block()), nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def get_lr(it, warmup=5, most=3e-3, steps=30):
    if it < warmup:
        return most * (it + 1) / warmup
    return most * 0.5 * (1 + math.cos(math.pi * (it - warmup) / (steps - warmup)))


@program("model(x, y)", "model(x, y.flip(0))")
def nano_gpt_loop(private):
    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    loader = loader_of(words())
    model, optimizer, loader = private(model, optimizer, loader, max_physical_batch_size=4)  # dp
    ctx, validation = torch.amp.autocast("cpu", dtype=torch.bfloat16), words()
    for it, (text,) in enumerate(loader.remaining()):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        if it % 10 == 0:
            model.eval()
            with torch.no_grad():
                print(model(validation[:, :-1], validation[:, 1:])[1].item())
            model.train()
        x, y = text[:, :-1], text[:, 1:]
        with ctx:
            logits, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


@program("(out, y)", "(out / out.detach().abs().max(), y)")
def low_rank_adapters(private):
    def loss_of(model, x, y):
        out = model(x).mean(1)
        return F.cross_entropy(out, y)

    model = Encoder().requires_grad_(False)
    layer = model.body.layers[0]
    layer.linear1, layer.linear2 = LoRA(layer.linear1), LoRA(layer.linear2)
    model.out.requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model, optimizer, loader = private(model, optimizer, loader_of(words(), labels()))  # dp
    train(model, optimizer, loader, loss_of)


def bert(head, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 16, "vocab_size": VOCABULARY}
    config = transformers.BertConfig(**sizes, **dropout, **options)
    return getattr(transformers, f"BertFor{head}")(config)


def items(**columns):
    rows = zip(*columns.values(), strict=True)
    return DataLoader([dict(zip(columns, row, strict=True)) for row in rows], batch_size=8)


@program("model(**batch)", 'model(**batch | {"labels": batch["labels"].flip(0)})')
def glue(private):
    model = bert("SequenceClassification", num_labels=4)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 1 - step / 30))
    data = items(
        input_ids=padded_words(), attention_mask=(padded_words() > 0).long(), labels=labels()
    )
    model, optimizer, loader = private(model, optimizer, data)  # dp
    predictions = []
    for _epoch in range(5):
        model.train()
        for batch in loader:
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            predictions += outputs.logits.argmax(-1).tolist()


@program(
    'per_example_loss(model, outputs, batch["labels"]).mean()  # dp',
    "outputs.loss",
    "per_example_loss",
)
def token_classification(private):
    model = bert("TokenClassification", num_labels=3)
    optimizer = adamw(model)
    data = items(input_ids=words(), labels=torch.where(padded_words() > 0, words() % 3, -100))
    model, optimizer, loader = private(model, optimizer, data)  # dp
    for _epoch in range(5):
        for batch in loader:
            outputs = model(**batch)
            loss = per_example_loss(model, outputs, batch["labels"]).mean()  # dp
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@program("end_positions=end", "end_positions=end.flip(0)")
def question_answering(private):
    def loss_of(model, x, start, end):
        return model(input_ids=x, start_positions=start, end_positions=end).loss

    model, ends = bert("QuestionAnswering"), torch.arange(ROWS) % LENGTH
    train(*private(model, adamw(model), loader_of(words(), ends // 2, ends)), loss_of)  # dp


@program("labels=target", "labels=target.roll(1, 0)")
def translation_with_t5(private):
    def loss_of(model, source, target):
        mask = (source != 0).long()
        return model(input_ids=source, attention_mask=mask, labels=target).loss

    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    sizes |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0}
    config = transformers.T5Config(dropout_rate=0.0, **sizes)
    model = transformers.T5ForConditionalGeneration(config)
    train(*private(model, adamw(model), loader_of(padded_words(), words())), loss_of)  # dp
