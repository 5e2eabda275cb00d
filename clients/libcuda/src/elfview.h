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
	const uint32_t *gnu_hash;	/* DT_GNU_HASH, NULL if it has none */
	const ElfW(Half) *versions;	/* of the symbols, NULL if they have none */
	const char *soname;	/* NULL if it has none */
};

bool mpsd_elfview_of_object(const struct dl_phdr_info *object, struct elfview *view);
bool mpsd_elfview_of_map(const struct link_map *map, struct elfview *view);
bool mpsd_elfview_of_handle(void *handle, struct elfview *view);	/* of dlopen() */

/*
 * The address of what this object itself defines by that name; NULL: it defines no such thing. Not dlsym(): a
 * library that the program preloads may have a dlsym() of its own, which answers with functions of that library.
 */
void *mpsd_elfview_address(const struct elfview *view, const char *name);
void *mpsd_elfview_symbol(void *handle, const char *name);	/* the same, for a handle of dlopen() or NULL */

/*
 * Where the object begins in which an address lies, and a copy of the name that the loader has for it. Not dladdr(),
 * which waits for a thread that is in dlopen().
 */
struct elfview_place {
	ElfW(Addr) base;
	char *name;	/* to be freed; NULL if there is no memory */
};

bool mpsd_elfview_place_of(const void *address, struct elfview_place *place);

/* The hash of a name in DT_HASH. */
uint32_t mpsd_elfview_hash(const char *name);
