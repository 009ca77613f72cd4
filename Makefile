# Thin names for `python3 dev.py ...`, which does all the work and its own set-up.
.PHONY: setup demo test full lint format proto clean cluster help

setup demo test lint format clean:
	python3 dev.py $@

cluster:
	python3 dev.py cluster up

full:
	python3 dev.py test --full

proto:
	bash elasticrt/store/proto/generate.sh

help:
	@python3 dev.py --help
