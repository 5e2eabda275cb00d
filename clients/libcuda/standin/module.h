/* SPDX-License-Identifier: MIT */
#pragma once

#include "standin.h"

struct global {
	struct global *next;
	char name[64];
	uintptr_t address;
	size_t size;
};

struct CUmod_st {
	struct CUmod_st *next;
	struct CUfunc_st *functions;
	struct global *globals;
	CUdevice device;
};

/* image.c */
CUresult read_image(struct CUmod_st *module, const char *image);
void free_module(struct CUmod_st *module);
