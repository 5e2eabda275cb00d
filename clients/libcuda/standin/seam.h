/* SPDX-License-Identifier: MIT */
/*
 * What decides over the stand-in's one GPU: whether a context may join, how much memory there is,
 * who dies of a fault. alone.c answers for this process alone, simulated.c asks the simulated GPU.
 *
 * All are called with the lock held, so they may not call the driver.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

enum access {
	ACCESS_READ,
	ACCESS_WRITE,
	ACCESS_NONE,	/* an exception of the SM's own */
};

struct backend {
	const char *name;
	CUresult (*attach)(void);
	void (*detach)(void);
	size_t (*total_memory)(void);
	size_t (*free_memory)(void);
	bool (*take_memory)(size_t size);
	void (*give_memory)(size_t size);
	/* A range that absorbs stray accesses, and reports them if it is managed. False: it cannot be had. */
	bool (*cover)(CUdeviceptr base, size_t size, bool managed);
	void (*uncover)(CUdeviceptr base, size_t size, bool managed);
	/* What the context dies of; CUDA_SUCCESS if the access was absorbed. */
	CUresult (*fault)(CUdeviceptr address, enum access access);
	/* At the end of a wait: what the context has died of meanwhile, by others' doing. */
	CUresult (*look)(void);
	/* Around what a stream's thread does. begin() is false: the channels are halted, and it has not begun. */
	bool (*begin)(void);
	bool (*end)(void);	/* false: it had ended already, by its own fault */
	bool (*is_halted)(void);
};

extern const struct backend *backend;

/* What the environment says. */
size_t environment_bytes(const char *name, size_t otherwise);

void choose_backend(void);
const struct backend *simulated_backend(const struct backend *memory);
