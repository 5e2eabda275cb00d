// SPDX-License-Identifier: MIT
/*
 * A program asks dlsym() which functions a driver has, and acts on the answer. So the names that
 * this library exports must be those of the driver behind it, which is known only now:
 *
 * - a name that the driver lacks is taken out of this library's hash table;
 * - a name that only the driver has is given to a spare stub, whose symbol was built with a long
 *   placeholder for a name.
 *
 * Only the hash table of the gABI (DT_HASH) and the strings are edited, before dlopen() of this
 * library returns; one word is written at a time, so a search under way elsewhere stays sound.
 */
#include <dlfcn.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "elfview.h"
#include "proxy.h"
#include "stats.h"

static uint32_t *bucket_of(const struct elfview *self, const char *name)
{
	return self->hash + 2 + mpsd_elfview_hash(name) % self->hash[0];
}

static uint32_t *chain_of(const struct elfview *self, uint32_t symbol)
{
	return self->hash + 2 + self->hash[0] + symbol;
}

static char *name_of(const struct elfview *view, uint32_t symbol)
{
	return view->strings + view->symbols[symbol].st_name;
}

static void take_out(const struct elfview *self, uint32_t symbol)
{
	uint32_t *link = bucket_of(self, name_of(self, symbol));

	while (*link && *link != symbol)
		link = chain_of(self, *link);
	if (*link)
		__atomic_store_n(link, *chain_of(self, symbol), __ATOMIC_RELEASE);
}

static void put_in(const struct elfview *self, uint32_t symbol)
{
	uint32_t *bucket = bucket_of(self, name_of(self, symbol));

	*chain_of(self, symbol) = *bucket;
	__atomic_store_n(bucket, symbol, __ATOMIC_RELEASE);
}

/* The slot of one of our own symbols; MPSD_SLOTS for one that is no stub. */
static unsigned int slot_of(const struct elfview *self, uint32_t symbol)
{
	uintptr_t at = self->base + self->symbols[symbol].st_value, first = (uintptr_t)mpsd_stubs;

	if (at < first || at >= first + (uintptr_t)MPSD_STUB_BYTES * MPSD_SLOTS)
		return MPSD_SLOTS;
	return (unsigned int)((at - first) / MPSD_STUB_BYTES);
}

static bool is_known(const char *name)
{
	unsigned int low = 0, high = MPSD_NAMES;

	while (low < high) {
		unsigned int middle = (low + high) / 2;
		int order = strcmp(name, mpsd_names[middle]);

		if (!order)
			return true;
		if (order < 0)
			high = middle;
		else
			low = middle + 1;
	}
	return false;
}

/* A function that the driver exports, in the names that are its own. */
static bool is_driver_function(const struct elfview *real, uint32_t symbol)
{
	const ElfW(Sym) *at = &real->symbols[symbol];
	unsigned char kind = ELF64_ST_TYPE(at->st_info), bind = ELF64_ST_BIND(at->st_info);

	return at->st_shndx != SHN_UNDEF && at->st_value && (kind == STT_FUNC || kind == STT_GNU_IFUNC) &&
	       (bind == STB_GLOBAL || bind == STB_WEAK) && !strncmp(name_of(real, symbol), "cu", 2);
}

/* Gives the driver's unknown names to the spare slots, from the first on; how many were given. */
static unsigned int name_spare(const struct elfview *real, const char **names)
{
	unsigned int given = 0;

	for (uint32_t symbol = 1; symbol < real->count; symbol++) {
		const char *name = name_of(real, symbol);

		if (!is_driver_function(real, symbol) || is_known(name))
			continue;
		if (given == MPSD_SPARE || strlen(name) >= MPSD_SPARE_NAME_ROOM) {
			mpsd_stats->lacking++;
			continue;
		}
		mpsd_real[MPSD_NAMES + given] = mpsd_elfview_address(real, name);
		names[given++] = name;
	}
	return given;
}

static void edit(const struct elfview *self, const char **spare_names, unsigned int given)
{
	for (uint32_t symbol = 1; symbol < self->count; symbol++) {
		unsigned int slot = slot_of(self, symbol);

		if (slot == MPSD_SLOTS || (slot < MPSD_NAMES && mpsd_real[slot]))
			continue;
		take_out(self, symbol);
		if (slot < MPSD_NAMES) {
			mpsd_stats->hidden++;
		} else if (slot - MPSD_NAMES < given) {
			strcpy(name_of(self, symbol), spare_names[slot - MPSD_NAMES]);
			put_in(self, symbol);
			mpsd_stats->added++;
		}
	}
}

/* The hash table and the strings lie in the first, read-only segment. */
static bool set_writable(const struct elfview *self, bool writable)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	uintptr_t hash = (uintptr_t)self->hash, strings = (uintptr_t)self->strings;
	uintptr_t hash_end = (uintptr_t)chain_of(self, self->count), strings_end = strings + self->string_bytes;
	int protection = PROT_READ | (writable ? PROT_WRITE : 0);

	hash -= hash % page;
	strings -= strings % page;
	return !mprotect((void *)hash, hash_end - hash, protection) &&
	       !mprotect((void *)strings, strings_end - strings, protection);
}

/*
 * Where this fails the proxy works all the same: names that the driver lacks then answer with
 * CUDA_ERROR_NOT_FOUND, and new ones are found by cuGetProcAddress alone.
 */
void mpsd_match_exports(const struct elfview *real)
{
	const char *spare_names[MPSD_SPARE];
	struct elfview self;
	unsigned int given;
	Dl_info info;
	void *extra;

	given = name_spare(real, spare_names);
	if (!dladdr1(mpsd_stubs, &info, &extra, RTLD_DL_LINKMAP) || !mpsd_elfview_of_map(extra, &self) ||
	    !self.hash || !set_writable(&self, true))
		return;
	edit(&self, spare_names, given);
	set_writable(&self, false);
}
