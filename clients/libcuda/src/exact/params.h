/* SPDX-License-Identifier: MIT */
/* The parameters of launches. */
#pragma once

#include "exact/undo.h"

/* A launch as the program gave it. */
struct mpsd_launch {
	CUfunction function;
	CUstream stream;
	const CUlaunchConfig *config;
	bool is_plain, is_cooperative;	/* by which of the driver's calls */
	bool is_brief;			/* as its operation is */
};

#define MPSD_PLACES 8192u		/* where functions are looked for: twice as many as there are */

/* newest.c, with the lock: a function has become known that is looked for there. Not `launched`: it may never be. */
void mpsd_newest_note(uint32_t place, bool launched);

/* An operation of it, with a copy of what it was given. NOT_SUPPORTED: it is not known how much. */
CUresult mpsd_params_take(const struct mpsd_launch *given, void **parameters, void **extra, struct mpsd_op **op);

/* The same launch once more, with a copy of its parameters. NULL: no memory. */
struct mpsd_op *mpsd_params_copy(const struct mpsd_op *op);

/* The same launch with one more attribute, or another value of it. NULL: no memory. */
struct mpsd_op *mpsd_params_with(const struct mpsd_op *op, CUlaunchAttributeID id, const CUlaunchAttributeValue *value);

/*
 * The same with the lock, of a function that is known, with no variables followed; NULL: it is not known, or something
 * else is to be done first.
 */
struct mpsd_op *mpsd_params_take_known(const struct mpsd_launch *given, void **parameters);

/* With the lock: what is kept of it by shapes.c; NULL: it is not known. */
#define MPSD_SHAPES 2u
uint32_t *mpsd_params_accepted(CUfunction function);

void mpsd_params_forget(void);	/* functions have gone: their handles may come again */

/* Without the lock: what leads to a module's variable leads there in the copy of this call. */
void mpsd_params_follow_variables(struct mpsd_op *op);

/*
 * With the lock: whether all that the parameters of a launch lead to is memory that is whole in this epoch, and nothing
 * of it the host's, or a module's variable.
 */
bool mpsd_params_are_whole(const struct mpsd_op *op);

/* What is said of a kernel that they give memory of the host's; kept for good. */
const char *mpsd_params_why_pinned(CUfunction function);

/* For mpsd_graph_each(): what validation has seen of a launch. `is_changed`: a pointer to bool (*)(struct mpsd_pages). */
CUresult mpsd_params_learn(const struct mpsd_op *op, void *is_changed);

/* Save what they lead to. */
CUresult mpsd_params_save(const struct mpsd_op *op, struct mpsd_plan *plan);
