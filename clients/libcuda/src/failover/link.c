// SPDX-License-Identifier: MIT
/* Links under way (cuLinkCreate): what was added is kept, and in another copy it is linked again when it is needed there. */
#include <stdlib.h>
#include <string.h>

#include "failover/line.h"
#include "failover/made.h"

#define MOST_OPTIONS 16

struct options {
	unsigned int count;
	CUjit_option names[MOST_OPTIONS];
	void *values[MOST_OPTIONS];
};

struct part {
	struct part *next;
	CUjitInputType type;
	struct options options;
	size_t size;
	char *name;		/* or the file's path */
	void *data;		/* NULL: it is a file */
};

struct mpsd_link {
	struct options options;
	struct part *first, **last;
	void *linked;		/* what the program was given by another copy than the first, which may be unloaded */
};

static bool keep_options(struct options *kept, unsigned int count, const CUjit_option *names, void **values)
{
	kept->count = 0;
	if (count > MOST_OPTIONS)
		return false;
	for (unsigned int i = 0; i < count; i++) {
		if (mpsd_image_writes(names[i]))
			continue;
		kept->names[kept->count] = names[i];
		kept->values[kept->count++] = values[i];
	}
	return true;
}

static void free_part(struct part *part)
{
	free(part->name);
	free(part->data);
	free(part);
}

void mpsd_link_free(struct mpsd_link *link)
{
	for (struct part *part = link ? link->first : NULL, *next; part; part = next) {
		next = part->next;
		free_part(part);
	}
	if (link)
		free(link->linked);
	free(link);
}

static CUresult add_again(CUlinkState native, const struct part *part)
{
	CUjit_option *names = (CUjit_option *)part->options.names;
	void **values = (void **)part->options.values;

	if (!part->data)
		return real_cuLinkAddFile_v2(native, part->type, part->name, part->options.count, names, values);
	return real_cuLinkAddData_v2(native, part->type, part->data, part->size, part->name, part->options.count, names,
				     values);
}

static CUresult link_again(struct mpsd_made *made, void **native)
{
	const struct mpsd_link *link = made->link;
	CUlinkState state = NULL;
	CUresult result;

	if (!link)
		return CUDA_SUCCESS;
	result = real_cuLinkCreate_v2(link->options.count, (CUjit_option *)link->options.names,
				      (void **)link->options.values, &state);
	for (const struct part *part = link->first; part && result == CUDA_SUCCESS; part = part->next)
		result = add_again(state, part);
	*native = state;
	return result;
}

static CUresult native_of(CUlinkState name, CUlinkState *native)
{
	return mpsd_made_late(name, (void **)native, link_again);
}

CUresult make_cuLinkCreate_v2(unsigned int numOptions, CUjit_option *options, void **optionValues,
			      CUlinkState *stateOut)
{
	struct mpsd_made record = { .kind = MPSD_MADE_LINK, .link = calloc(1, sizeof(*record.link)) };
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = inner_cuLinkCreate_v2(numOptions, options, optionValues, stateOut);

	if (result != CUDA_SUCCESS || !record.link ||
	    !keep_options(&record.link->options, numOptions, options, optionValues)) {
		free(record.link);
		return mpsd_line_made(result, "a linker state with too many options");
	}
	record.link->last = &record.link->first;
	record.native = *stateOut;
	if (!mpsd_made_add(&record, moves)) {
		free(record.link);
		return MPSD_AGAIN;
	}
	*stateOut = record.name;
	return result;
}

/* Takes the part. AGAIN: the copy was left meanwhile. */
static CUresult note_part(CUlinkState name, struct part *part, bool is_whole)
{
	struct mpsd_made *made;
	bool is;

	mpsd_made_lock();
	is = !mpsd_is_left();
	made = is ? mpsd_made_find(name) : NULL;
	if (made && made->link && is_whole) {
		*made->link->last = part;
		made->link->last = &part->next;
		part = NULL;
	}
	mpsd_made_unlock();
	if (part) {
		free_part(part);
		return mpsd_line_made(CUDA_SUCCESS, "a linker state from an untracked API call");
	}
	return is ? CUDA_SUCCESS : MPSD_AGAIN;
}

static CUresult added(CUresult result, CUlinkState state, struct part given, unsigned int count,
		      const CUjit_option *names, void **values, const char *name, const void *data)
{
	struct part *part;
	bool is_whole;

	if (result != CUDA_SUCCESS)
		return result;
	part = malloc(sizeof(*part));
	if (!part)
		return mpsd_line_made(result, "a linker state for which host memory is missing");
	*part = given;
	is_whole = keep_options(&part->options, count, names, values);
	part->name = name ? strdup(name) : NULL;
	part->data = data ? malloc(given.size + 1) : NULL;
	if (part->data)
		memcpy(part->data, data, given.size);
	is_whole = is_whole && (!name || part->name) && (!data || part->data);
	return note_part(state, part, is_whole);
}

CUresult make_cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name,
			       unsigned int numOptions, CUjit_option *options, void **optionValues)
{
	CUlinkState native;
	CUresult result = native_of(state, &native);

	if (result == CUDA_SUCCESS)
		result = inner_cuLinkAddData_v2(native, type, data, size, name, numOptions, options, optionValues);
	return added(result, state, (struct part){ .type = type, .size = size }, numOptions, options, optionValues,
		     name, data);
}

CUresult make_cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char *path, unsigned int numOptions,
			       CUjit_option *options, void **optionValues)
{
	CUlinkState native;
	CUresult result = native_of(state, &native);

	if (result == CUDA_SUCCESS)
		result = inner_cuLinkAddFile_v2(native, type, path, numOptions, options, optionValues);
	return added(result, state, (struct part){ .type = type }, numOptions, options, optionValues, path, NULL);
}

/* It stays until the link ends, whatever becomes of the copy. */
static CUresult keep_linked(CUlinkState name, void **linked, size_t size)
{
	void *kept = malloc(size + 1);
	struct mpsd_made *made;

	if (!kept)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(kept, *linked, size);
	mpsd_made_lock();
	made = mpsd_made_find(name);
	if (made && made->link) {
		free(made->link->linked);
		*linked = made->link->linked = kept;
		kept = NULL;
	}
	mpsd_made_unlock();
	free(kept);
	return CUDA_SUCCESS;
}

CUresult make_cuLinkComplete(CUlinkState state, void **cubinOut, size_t *sizeOut)
{
	CUlinkState native;
	size_t size = 0;
	CUresult result = native_of(state, &native);

	if (result == CUDA_SUCCESS)
		result = mpsd_answered(inner_cuLinkComplete(native, cubinOut, sizeOut ? sizeOut : &size));
	if (result != CUDA_SUCCESS || !mpsd_tables()->moves)
		return result;
	return keep_linked(state, cubinOut, sizeOut ? *sizeOut : size);
}
