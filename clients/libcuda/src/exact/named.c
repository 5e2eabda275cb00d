// SPDX-License-Identifier: MIT
/*
 * Kernels that are named to this library, as validation has found them out: MPSD_FAILOVER_UNSURE, of those that write
 * where their parameters do not lead, and MPSD_FAILOVER_OPAQUE, of those that keep something in a variable of their
 * module; each a list with commas. What they do cannot be undone, or does not go along, and is told like the rest of it.
 */
#include "exact/named.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exact/still.h"
#include "failover/line.h"
#include "failover/made.h"

struct named {
	struct named *next;
	char *name, *why;
	bool is_opaque;
};

static struct named *all;
MPSD_READ_OFTEN bool mpsd_named_any;

static void add(const char *name, size_t length, const char *what, bool is_opaque)
{
	struct named *named = length ? calloc(1, sizeof(*named)) : NULL;

	if (!named)
		return;
	*named = (struct named){ all, strndup(name, length), NULL, is_opaque };
	if (named->name && asprintf(&named->why, "%s: %.120s", what, named->name) >= 0)
		all = named;
	else
		free(named);
}

static void read_list(const char *variable, const char *what, bool is_opaque)
{
	const char *list = secure_getenv(variable);

	while (list && *list) {
		size_t length = strcspn(list, ",");

		add(list, length, what, is_opaque);
		list += length + (list[length] == ',');
	}
}

void mpsd_named_start(void)
{
	if (all)
		return;
	read_list("MPSD_FAILOVER_UNSURE", "a kernel that writes where its parameters do not lead", false);
	read_list("MPSD_FAILOVER_OPAQUE", "a kernel that writes a variable of its module", true);
	mpsd_named_any = all != NULL;
}

const char *mpsd_name_of_function(CUfunction function)
{
	bool is_kernel = mpsd_made_is(function, MPSD_MADE_KERNEL);
	CUresult result = CUDA_ERROR_NOT_FOUND;
	const char *name = NULL;

	if (is_kernel && mpsd_tables()->real[MPSD_cuKernelGetName])
		result = real_cuKernelGetName(&name, mpsd_native((CUkernel)function));
	else if (!is_kernel && mpsd_tables()->real[MPSD_cuFuncGetName])
		result = real_cuFuncGetName(&name, mpsd_native(function));
	return result == CUDA_SUCCESS ? name : NULL;
}

static void tell_unsure(const char *why)
{
	mpsd_epoch_unsure(why);
	mpsd_word_take(&mpsd_exact_lock);
	if (!mpsd_is_left())
		mpsd_still_unsure();
	mpsd_word_give(&mpsd_exact_lock);
}

void mpsd_named_look(CUfunction function)
{
	const char *name = all ? mpsd_name_of_function(function) : NULL;

	for (const struct named *named = all; name && named; named = named->next) {
		if (strcmp(named->name, name) != 0)
			continue;
		if (named->is_opaque)
			mpsd_line_opaque(named->why);
		else
			tell_unsure(named->why);
	}
}
