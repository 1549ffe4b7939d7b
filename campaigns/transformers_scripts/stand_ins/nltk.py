"""A replacement of the package `nltk`, which loads data from the network: a text is one sentence."""

from __future__ import annotations

from typing import Any


class Data:
    @staticmethod
    def find(name: str) -> str:
        return name


data = Data


def download(name: str, **options: Any) -> None: ...


def sent_tokenize(text: str) -> list[str]:
    return [text]
