"""The checkpoint format: the files on disk, how they are written, and how they are proved complete. Torch-free.

`codec` (values as JSON), `canonical_json` (JSON as bytes), `files` (all access to the file system), `manifest` (the description of a
checkpoint), `writing` (writes one file), `directory` (staging, commit, reading), `schema` (the structure of the JSON files), `lock`,
`retention` and `comparing`. Must not know training, ranks or when a run saves; a reader of the format needs nothing else.
"""
