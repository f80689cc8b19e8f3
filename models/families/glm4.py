"""GLM-4: GLM with norms after attention and MLP."""

from sinkring.models.registry import Family

GLM4 = Family(name="glm4", examples="GLM-4-0414", partial=True, interleaved=True)
