/* SPDX-License-Identifier: MIT */
/*
 * What decides over the stand-in's one GPU: whether a context may join, how much memory there is,
 * who dies of a fault. alone.c answers for this process alone; a connection to the simulated GPU of
 * mpsd (memory of all processes, MPS servers, faults that spread) takes its place here.
 *
 * All but `fault` are called with the lock held, so they may not call the driver; `kill_context` in
 * standin.h is how a back end tells that a context is lost.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

enum access {
	ACCESS_READ,
	ACCESS_WRITE,
};

struct backend {
	const char *name;
	CUresult (*attach)(void);
	void (*detach)(void);
	size_t (*total_memory)(void);
	size_t (*free_memory)(void);
	bool (*take_memory)(size_t size);
	void (*give_memory)(size_t size);
	CUresult (*fault)(CUdeviceptr address, enum access access);	/* what the context dies of */
};

extern const struct backend *const backend;
