// A job's history as a message.
#ifndef BALLAST_SERVER_JOBS_HISTORY_MESSAGE_H_
#define BALLAST_SERVER_JOBS_HISTORY_MESSAGE_H_

#include "ballast/v1/diagnostics.pb.h"
#include "cpu_optimizer_service/common/history/job_history.h"

namespace ballast::server {

v1::JobHistory ToMessage(const HistoryView& view);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_HISTORY_MESSAGE_H_
