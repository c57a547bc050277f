"""Objectives that did not beat FAT. They work, and docs/what-did-not-work.md says what was measured."""
