/* SPDX-License-Identifier: MIT */
/* The dynamic symbols of an object in memory, as the gABI lays them out. */
#pragma once

#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct elfview {
	ElfW(Addr) base;
	ElfW(Sym) *symbols;
	char *strings;
	size_t string_bytes;
	uint32_t count;		/* of symbols */
	uint32_t *hash;		/* DT_HASH, NULL if it has none */
	const char *soname;	/* NULL if it has none */
};

bool mpsd_elfview_of_object(const struct dl_phdr_info *object, struct elfview *view);
bool mpsd_elfview_of_map(const struct link_map *map, struct elfview *view);
