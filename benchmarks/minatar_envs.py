"""Registers the games of the package `minatar`, which gymnasium does not find by itself: `--import benchmarks.minatar_envs`."""

from minatar.gym import register_envs

register_envs()
