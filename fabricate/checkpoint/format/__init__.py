"""The checkpoint format: what lies on disk, how it gets there and is proved whole. Torch-free.

`codec` (values as JSON), `canonical_json` (JSON as bytes), `files` (the one seam to the file system), `manifest` and
`writing` (what a checkpoint says about itself, and one file of it), `directory` (staging, commit, reading), `schema` (its
JSON files), `lock`, `retention` and `comparing`. Must not know training, ranks or when a run
saves; a reader of the format needs nothing else.
"""
