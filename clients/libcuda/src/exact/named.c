// SPDX-License-Identifier: MIT
/*
 * MPSD_FAILOVER_KERNELS="unsure:NAME,opaque:NAME": the kernels that validation found. An unsure kernel writes where its
 * parameters do not lead. An opaque kernel keeps data in a variable of its module. What they do cannot be rolled back, or
 * is not in the standby context, and is reported like the rest of it.
 */
#include "exact/named.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "debug.h"
#include "exact/still.h"
#include "failover/line.h"
#include "failover/made.h"

#define VARIABLE "MPSD_FAILOVER_KERNELS"

struct named {
	struct named *next;
	char *name, *why;
	bool is_opaque;
};

static struct named *all;
MPSD_READ_OFTEN bool mpsd_named_any;

#define UNSURE "unsure:"
#define OPAQUE "opaque:"
_Static_assert(sizeof(UNSURE) == sizeof(OPAQUE), "a name begins at the same place");

static void add(const char *name, size_t length, bool is_opaque)
{
	const char *what = is_opaque ? "a kernel that writes a module variable"
				     : "a kernel that writes memory not reachable from its parameters";
	struct named *named = length ? calloc(1, sizeof(*named)) : NULL;

	if (!named)
		return;
	*named = (struct named){ all, strndup(name, length), NULL, is_opaque };
	if (named->name && asprintf(&named->why, "%s: %.120s", what, named->name) >= 0)
		all = named;
	else
		free(named);
}

/* `kind`: of every item; NULL: each item says its own. */
static void read_list(const char *list, const char *kind)
{
	while (list && *list) {
		int length = (int)strcspn(list, ",");
		const char *name = kind ? list : list + strlen(UNSURE), *said = kind ? kind : list;
		bool is_opaque = !strncmp(said, OPAQUE, strlen(OPAQUE));

		if (is_opaque || !strncmp(said, UNSURE, strlen(UNSURE)))
			add(name, (size_t)(list + length - name), is_opaque);
		else if (length)
			mpsd_say(VARIABLE ": %.*s is ignored: write unsure:KERNEL or opaque:KERNEL", length, list);
		list += length + (list[length] == ',');
	}
}

void mpsd_named_start(void)
{
	static bool has_begun;

	if (has_begun)
		return;
	has_begun = true;
	read_list(secure_getenv(VARIABLE), NULL);
	read_list(mpsd_debug_retired("MPSD_FAILOVER_UNSURE", VARIABLE "=unsure:KERNEL"), UNSURE);
	read_list(mpsd_debug_retired("MPSD_FAILOVER_OPAQUE", VARIABLE "=opaque:KERNEL"), OPAQUE);
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
