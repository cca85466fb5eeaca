// In place of mlx's: functions of bfloat are in msl.h.
#pragma once
