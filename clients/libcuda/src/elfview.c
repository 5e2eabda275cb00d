// SPDX-License-Identifier: MIT
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

#include "elfview.h"

/* Of a symbol's version: dlsym() without a version does not find the symbol (gABI, symbol versioning). */
#define IS_HIDDEN 0x8000

/* glibc has added the base to the pointers of the dynamic section; other loaders, and the vDSO, have not. */
static ElfW(Addr) absolute(const struct elfview *view, ElfW(Addr) value)
{
	return value < view->base ? view->base + value : value;
}

/* The GNU hash table does not say how many symbols there are: it is one past the last of its last chain. */
static uint32_t count_by_gnu_hash(const uint32_t *table)
{
	uint32_t buckets = table[0], first = table[1], bloom_words = table[2];
	const uint32_t *bucket = (const uint32_t *)((const ElfW(Addr) *)(table + 4) + bloom_words);
	const uint32_t *chain = bucket + buckets;
	uint32_t last = 0;

	for (uint32_t i = 0; i < buckets; i++)
		if (bucket[i] > last)
			last = bucket[i];
	if (last < first)
		return first;
	while (!(chain[last - first] & 1))
		last++;
	return last + 1;
}

static bool read_dynamic(const ElfW(Dyn) *entry, struct elfview *view)
{
	ElfW(Addr) soname = 0;

	for (; entry->d_tag != DT_NULL; entry++) {
		switch (entry->d_tag) {
		case DT_SYMTAB:
			view->symbols = (ElfW(Sym) *)absolute(view, entry->d_un.d_ptr);
			break;
		case DT_STRTAB:
			view->strings = (char *)absolute(view, entry->d_un.d_ptr);
			break;
		case DT_STRSZ:
			view->string_bytes = entry->d_un.d_val;
			break;
		case DT_HASH:
			view->hash = (uint32_t *)absolute(view, entry->d_un.d_ptr);
			break;
		case DT_GNU_HASH:
			view->gnu_hash = (const uint32_t *)absolute(view, entry->d_un.d_ptr);
			break;
		case DT_VERSYM:
			view->versions = (const ElfW(Half) *)absolute(view, entry->d_un.d_ptr);
			break;
		case DT_SONAME:
			soname = entry->d_un.d_val;
			break;
		}
	}
	if (!view->symbols || !view->strings || !(view->hash || view->gnu_hash))
		return false;
	view->count = view->hash ? view->hash[1] : count_by_gnu_hash(view->gnu_hash);
	view->soname = soname ? view->strings + soname : NULL;
	return true;
}

bool mpsd_elfview_of_map(const struct link_map *map, struct elfview *view)
{
	*view = (struct elfview){ .base = map->l_addr };
	return map->l_ld && read_dynamic(map->l_ld, view);
}

bool mpsd_elfview_of_handle(void *handle, struct elfview *view)
{
	struct link_map *map;

	return !dlinfo(handle, RTLD_DI_LINKMAP, &map) && mpsd_elfview_of_map(map, view);
}

bool mpsd_elfview_of_object(const struct dl_phdr_info *object, struct elfview *view)
{
	*view = (struct elfview){ .base = object->dlpi_addr };
	for (int i = 0; i < object->dlpi_phnum; i++)
		if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
			return read_dynamic((const ElfW(Dyn) *)(object->dlpi_addr +
								object->dlpi_phdr[i].p_vaddr), view);
	return false;
}

uint32_t mpsd_elfview_hash(const char *name)
{
	uint32_t hash = 0;

	for (; *name; name++) {
		uint32_t high;

		hash = (hash << 4) + (unsigned char)*name;
		high = hash & 0xf0000000;
		hash = (hash ^ (high >> 24)) & ~high;
	}
	return hash;
}

static bool defines(const struct elfview *view, uint32_t symbol, const char *name)
{
	const ElfW(Sym) *at = &view->symbols[symbol];

	return at->st_shndx != SHN_UNDEF && !strcmp(view->strings + at->st_name, name) &&
	       !(view->versions && view->versions[symbol] & IS_HIDDEN);
}

static uint32_t find_by_hash(const struct elfview *view, const char *name)
{
	const uint32_t *table = view->hash, *chain = table + 2 + table[0];
	uint32_t symbol = table[0] ? table[2 + mpsd_elfview_hash(name) % table[0]] : 0;

	while (symbol && !defines(view, symbol, name))
		symbol = chain[symbol];
	return symbol;
}

static uint32_t find_by_gnu_hash(const struct elfview *view, const char *name)
{
	const uint32_t *table = view->gnu_hash;
	uint32_t buckets = table[0], first = table[1], bloom_words = table[2], hash = 5381;
	const uint32_t *bucket = (const uint32_t *)((const ElfW(Addr) *)(table + 4) + bloom_words);
	const uint32_t *chain = bucket + buckets;
	uint32_t symbol;

	for (const char *at = name; *at; at++)
		hash = hash * 33 + (unsigned char)*at;
	symbol = buckets ? bucket[hash % buckets] : 0;
	if (!symbol || symbol < first)
		return 0;
	for (;; symbol++) {
		if ((chain[symbol - first] | 1) == (hash | 1) && defines(view, symbol, name))
			return symbol;
		if (chain[symbol - first] & 1)
			return 0;
	}
}

void *mpsd_elfview_address(const struct elfview *view, const char *name)
{
	uint32_t symbol = view->gnu_hash ? find_by_gnu_hash(view, name) : find_by_hash(view, name);
	void *address = symbol ? (void *)(view->base + view->symbols[symbol].st_value) : NULL;

	/* What chooses the function is there, and not the function. It is given what the loader gives it. */
	if (address && ELF64_ST_TYPE(view->symbols[symbol].st_info) == STT_GNU_IFUNC)
		return ((void *(*)(unsigned long))address)(getauxval(AT_HWCAP));
	return address;
}

void *mpsd_elfview_symbol(void *handle, const char *name)
{
	struct elfview view;

	return handle && mpsd_elfview_of_handle(handle, &view) ? mpsd_elfview_address(&view, name) : NULL;
}

struct place_search {
	uintptr_t address;
	struct elfview_place *place;
};

static int has_address(struct dl_phdr_info *object, size_t size, void *context)
{
	const struct place_search *search = context;

	(void)size;
	for (int i = 0; i < object->dlpi_phnum; i++) {
		const ElfW(Phdr) *part = &object->dlpi_phdr[i];
		uintptr_t begin = object->dlpi_addr + part->p_vaddr;

		if (part->p_type != PT_LOAD || search->address < begin || search->address - begin >= part->p_memsz)
			continue;
		*search->place = (struct elfview_place){ object->dlpi_addr, strdup(object->dlpi_name) };
		return 1;
	}
	return 0;
}

bool mpsd_elfview_place_of(const void *address, struct elfview_place *place)
{
	struct place_search search = { (uintptr_t)address, place };

	return dl_iterate_phdr(has_address, &search) != 0;
}
