// SPDX-License-Identifier: MIT
#include "elfview.h"

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
	const uint32_t *gnu_hash = NULL;
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
			gnu_hash = (const uint32_t *)absolute(view, entry->d_un.d_ptr);
			break;
		case DT_SONAME:
			soname = entry->d_un.d_val;
			break;
		}
	}
	if (!view->symbols || !view->strings || !(view->hash || gnu_hash))
		return false;
	view->count = view->hash ? view->hash[1] : count_by_gnu_hash(gnu_hash);
	view->soname = soname ? view->strings + soname : NULL;
	return true;
}

bool mpsd_elfview_of_map(const struct link_map *map, struct elfview *view)
{
	*view = (struct elfview){ .base = map->l_addr };
	return map->l_ld && read_dynamic(map->l_ld, view);
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
