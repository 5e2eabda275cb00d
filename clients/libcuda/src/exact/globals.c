// SPDX-License-Identifier: MIT
/*
 * The variables of the program's modules, which lie in another place in each copy of the driver and are not carried over
 * where kernels write them. Whose kernel an operation is has its module's read before and after it; of a graph, all.
 */
#include "exact/globals.h"

#include <stdlib.h>
#include <string.h>

#include "exact/pages.h"
#include "exact/symbols.h"
#include "failover/line.h"
#include "failover/made.h"

#define MOST_BYTES ((size_t)16 << 20)	/* of one module */

/* Of what has the image: a module, or a library. */
struct module {
	struct module *next;
	const void *name;
	const struct mpsd_image *image;
	bool is_library, is_wanted;
	char **names;
	struct arena_range *places;	/* of each, in the copy of these */
	size_t count, room, bytes;
	char *was;		/* of all, one behind the other */
};

static struct module *modules;
static uint64_t moves;		/* before the copy that all of it is of */
static char *now;		/* as `was`, of the one that is looked at */
static uint64_t unknown;

static void free_modules(void)
{
	struct module *module;

	while ((module = modules)) {
		modules = module->next;
		for (size_t i = 0; i < module->count; i++)
			free(module->names[i]);
		free(module->names);
		free(module->places);
		free(module->was);
		free(module);
	}
}

static void add_name(void *to, const char *name, size_t length)
{
	struct module *module = to;
	char **more = module->names;

	if (module->count == module->room) {
		module->room = module->room ? 2 * module->room : 16;
		more = realloc(more, module->room * sizeof(*more));
	}
	if (!more) {
		module->room = module->count;
		return;
	}
	module->names = more;
	more[module->count] = strndup(name, length);
	module->count += more[module->count] != NULL;
}

static unsigned int arch(void)
{
	CUdevice device = mpsd_current_device();
	int major = 0, minor = 0;

	if (device < 0)
		return 0;
	real_cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
	real_cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
	return (unsigned int)(major * 10 + minor);
}

/* Under the lock of the records: what its image says. */
static void read_names(struct module *module)
{
	struct mpsd_symbols found = { .add = add_name, .to = module };
	const void *image = module->image ? mpsd_image_data(module->image) : NULL;
	size_t size = image ? mpsd_image_bytes(module->image) : 0;

	if (size)
		mpsd_symbols_read(image, size, arch(), &found);
	if (!size || found.is_unread) {
		unknown++;
		mpsd_say("module variables of a code image are not checked: %s",
			 size ? "the image is compressed" : "the image's location is unknown");
	}
	if (found.has_heap) {
		unknown++;
		mpsd_say("a code image uses the device heap (malloc in kernels), which fail-over does not preserve");
	}
}

static struct module *find_module(const struct mpsd_made *made)
{
	for (struct module *module = modules; module; module = module->next)
		if (module->name == made->name && module->image == made->image)
			return module;
	return NULL;
}

/* Under the lock of the records. */
static void want(const struct mpsd_made *made)
{
	struct module *module;

	made = mpsd_made_origin(made);
	if (!made)
		return;
	module = find_module(made);
	if (!module) {
		module = calloc(1, sizeof(*module));
		if (!module)
			return;
		module->next = modules;
		module->name = made->name;
		module->image = made->image;
		module->is_library = made->kind == MPSD_MADE_LIBRARY;
		modules = module;
		read_names(module);
	}
	module->is_wanted = module->count != 0;
}

static void want_all_of(const struct mpsd_op *op)
{
	for (struct module *module = modules; module; module = module->next)
		module->is_wanted = false;
	mpsd_made_lock();
	if (op->kind == MPSD_OP_LAUNCH) {
		want(mpsd_made_find(op->launch.function));
	} else if (op->kind == MPSD_OP_GRAPH) {
		for (const struct mpsd_made *made = mpsd_made_oldest(); made; made = made->newer)
			if (mpsd_made_is_code(made))
				want(made);
	}
	mpsd_made_unlock();
}

static CUresult find_variable(const struct module *module, const char *name, struct arena_range *place)
{
	void *native = mpsd_native((CUmodule)module->name);
	CUdeviceptr address = 0;
	CUresult result;

	result = module->is_library ? real_cuLibraryGetGlobal(&address, &place->size, native, name)
				    : real_cuModuleGetGlobal_v2(&address, &place->size, native, name);
	place->base = address;
	return result;
}

/* Where they are; those that the driver does not know, or that the host has too, are left out. */
static void find_variables(struct module *module)
{
	size_t kept = 0;

	module->places = calloc(module->count, sizeof(*module->places));
	for (size_t i = 0; i < module->count; i++) {
		struct arena_range place = { 0, 0 };
		char *name = module->names[i];
		int is_managed = 0;
		bool is = module->places && find_variable(module, name, &place) == CUDA_SUCCESS;

		if (is)
			real_cuPointerGetAttribute(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, place.base);
		if (!is || is_managed || place.size > MOST_BYTES - module->bytes) {
			free(name);
			continue;
		}
		module->bytes += place.size;
		module->names[kept] = name;
		module->places[kept++] = place;
	}
	module->count = kept;
	module->was = malloc(module->bytes + 1);
}

static bool read_variables(const struct module *module, char *to)
{
	return mpsd_pages_read(to, module->places, module->count) == CUDA_SUCCESS;
}

void mpsd_globals_before(const struct mpsd_op *op)
{
	if (!now)
		now = malloc(MOST_BYTES);
	/* Records of another copy's modules may have other images behind the same names. */
	if (moves != mpsd_tables()->moves)
		free_modules();
	moves = mpsd_tables()->moves;
	want_all_of(op);
	for (struct module *module = modules; module; module = module->next) {
		if (module->is_wanted && !module->was)
			find_variables(module);
		module->is_wanted = module->is_wanted && now && module->was && read_variables(module, module->was);
	}
}

/* From that one on, counted over all of the module. */
static const char *changed_in(const struct module *module, uint64_t from, uint64_t *at)
{
	size_t offset = 0;

	for (uint64_t i = 0; i < module->count; i++) {
		size_t size = module->places[i].size;

		if (i >= from && memcmp(now + offset, module->was + offset, size) != 0) {
			*at = i + 1;
			return module->names[i];
		}
		offset += size;
	}
	return NULL;
}

const char *mpsd_globals_changed(uint64_t *at)
{
	for (struct module *module = modules; module; module = module->next) {
		const char *name;

		if (!module->is_wanted)
			continue;
		name = *at || read_variables(module, now) ? changed_in(module, *at, at) : NULL;
		if (name)
			return name;
		module->is_wanted = false;
		*at = 0;
	}
	return NULL;
}

uint64_t mpsd_globals_unknown(void)
{
	return unknown;
}
