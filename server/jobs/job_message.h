// A job's status and description as messages.
#ifndef BALLAST_SERVER_JOBS_JOB_MESSAGE_H_
#define BALLAST_SERVER_JOBS_JOB_MESSAGE_H_

#include <cstddef>

#include "ballast/v1/jobs.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::server {

v1::JobPhase ToMessage(JobPhase phase);
v1::Job ToMessage(const Engine& engine, const Job& job, bool with_parameters);

// For a job that is being created, from Engine::JobsBeingCreated.
v1::Job CreatingMessage(const Engine& engine, const Job& job);

// Puts the known checkpoint under the job's name into the message. False: there is none.
bool AddFoundCheckpoint(const Engine& engine, const Job& job, v1::Job& message);

// The maximal size of such a message for a job with this description, with parameters, at any time
// of its life, including the reply's other fields.
size_t LargestMessageBytes(const JobSpec& spec);

// One group of a job, with `values` as its hyper-parameters.
v1::ParamGroup ToMessage(const Job& job, int group, const HyperParameters& values);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_JOB_MESSAGE_H_
