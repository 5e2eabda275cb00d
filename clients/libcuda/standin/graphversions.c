// SPDX-License-Identifier: MIT
/* Calls of older versions of cuda.h. */
#include "standin.h"

#undef cuGraphAddKernelNode
#undef cuGraphKernelNodeSetParams
#undef cuGraphExecKernelNodeSetParams
#undef cuGraphExecUpdate
#undef cuGraphInstantiate

static CUDA_KERNEL_NODE_PARAMS newer(const CUDA_KERNEL_NODE_PARAMS_v1 *given)
{
	return (CUDA_KERNEL_NODE_PARAMS){
		given->func,	  given->gridDimX,	 given->gridDimY,     given->gridDimZ, given->blockDimX, given->blockDimY,
		given->blockDimZ, given->sharedMemBytes, given->kernelParams, given->extra,    NULL,		 NULL,
	};
}

API CUresult cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				  size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams);
API CUresult cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				  size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	CUDA_KERNEL_NODE_PARAMS given;

	if (!nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	given = newer(nodeParams);
	return cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies, &given);
}

API CUresult cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams);
API CUresult cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	CUDA_KERNEL_NODE_PARAMS given;

	if (!nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	given = newer(nodeParams);
	return cuGraphKernelNodeSetParams_v2(hNode, &given);
}

API CUresult cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					    const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams);
API CUresult cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					    const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	CUDA_KERNEL_NODE_PARAMS given;

	if (!nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	given = newer(nodeParams);
	return cuGraphExecKernelNodeSetParams_v2(hGraphExec, hNode, &given);
}

API CUresult cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
			       CUgraphExecUpdateResult *updateResult_out);
API CUresult cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
			       CUgraphExecUpdateResult *updateResult_out)
{
	CUgraphExecUpdateResultInfo info;
	CUresult result;

	if (!updateResult_out)
		return CUDA_ERROR_INVALID_VALUE;
	result = cuGraphExecUpdate_v2(hGraphExec, hGraph, &info);
	*updateResult_out = info.result;
	if (hErrorNode_out)
		*hErrorNode_out = info.errorNode;
	return result;
}

API CUresult cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
				   size_t bufferSize);
API CUresult cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
				   size_t bufferSize)
{
	(void)phErrorNode;
	(void)logBuffer;
	(void)bufferSize;
	return cuGraphInstantiateWithFlags(phGraphExec, hGraph, 0);
}
