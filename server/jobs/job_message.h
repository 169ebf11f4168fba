// A job's status and description as messages.
#ifndef BALLAST_SERVER_JOBS_JOB_MESSAGE_H_
#define BALLAST_SERVER_JOBS_JOB_MESSAGE_H_

#include <cstddef>

#include "ballast/v1/ballast.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::server {

v1::Job ToMessage(const Engine& engine, const Job& job, bool with_parameters);

// Of a job that is being created, as Engine::JobsBeingCreated has it.
v1::Job CreatingMessage(const Engine& engine, const Job& job);

// Puts what is known to be saved under the job's name into the message. False: nothing is.
bool AddFoundCheckpoint(const Engine& engine, const Job& job, v1::Job& message);

// The most bytes that such a message of a job with this description can take, with parameters and
// at any time of its life; the other fields of a reply included.
size_t LargestMessageBytes(const JobSpec& spec);

// One group of a job, with `values` as its hyper-parameters.
v1::ParamGroup ToMessage(const Job& job, int group, const HyperParameters& values);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_JOB_MESSAGE_H_
